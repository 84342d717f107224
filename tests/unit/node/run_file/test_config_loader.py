"""Run files: accepted and refused values, the error messages, and windows."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.run_file.loader import (
    MOST_WRONG,
    OTHER_NAMES,
    change_config,
    default_config,
    from_json,
    full_keys,
    load_config,
    parse_override,
    recipe,
    recipes,
    section_types,
    stored_config,
    to_json,
    to_toml,
    toml_value,
    with_absolute_paths,
)
from node.schedule.schedule import held_activations, schedule
from node.state.byte_tokenizer import byte_pieces
from node.state.families import write_config
from node.tuning.device_memory import Devices
from node.tuning.memory import most_held, stage_bytes
from tests.support.cases import each
from wire.errors import ConfigError, DataError

DEPLOY = Path(__file__).parents[4] / "deploy"
RUN_FILES = [
    *sorted(path for path in DEPLOY.rglob("*.toml") if path.parent.name != "lab"),
    *map(recipe, recipes()),
]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_other_names_lead_to_keys_that_are_there() -> None:
    names = [name for names in OTHER_NAMES.values() for name in names]
    assert OTHER_NAMES.keys() <= {*full_keys()} and len({*names}) == len(names)
    assert {*names}.isdisjoint(full.partition(".")[2] for full in full_keys())


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == RunConfig() == default_config()


def test_values_are_read_into_their_types(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            """
            [training]
            lr = 1          # a whole number where a float is meant
            [pipeline]
            split = [1, 2, 3, 2]
            [coordinator]
            advertise = ["a.example:7700"]
            """,
        )
    )
    assert config.training == TrainingSection(lr=1.0)
    assert type(config.training.lr) is float
    assert config.pipeline == PipelineSection(split=(1, 2, 3, 2))
    assert config.coordinator.advertise == ("a.example:7700",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[trainning]\nlr = 1.0", ["unknown section [trainning]", "did you mean 'training'?"]),
        ("[training]\nlrr = 1.0", ["unknown key 'lrr' in [training]", "did you mean 'lr'?"]),
        ("[training]\nbatch_size = 8", ["unknown key 'batch_size'", "did you mean training.global_batch?"]),
        ("[model]\nLearning_Rate = 1.0", ["unknown key", "did you mean training.lr?"]),
        ("[training]\nlora_alpha = 1.0", ["unknown key", "did you mean lora.alpha?"]),
        ("[training]\nwarmup = 5", ["unknown key", "did you mean 'warmup_steps'?"]),
        ("[training]\nnum_train_epochs = 3", ["unknown key", "did you mean run.tokens?"]),
        ("[training]\nLR = 1.0", ["unknown key 'LR'", "did you mean 'lr'?"]),
        ("[training]\nsequence = 8", ["unknown key 'sequence'", "did you mean model.sequence?"]),
        ("[zzz]", ["unknown section [zzz]", "known: run, model"]),
        ("steps = 3", ["key 'steps' is outside its section", "[run]"]),
        ("run = 3", ["[run] must be a section", "3 (a whole number)"]),
        ("[run]\nsteps = 3.0", ["run.steps must be a whole number", "3.0 (a number)"]),
        ("[run]\nsteps = true", ["run.steps must be a whole number", "True (true or false)"]),
        ("[run]\nname = 3", ["run.name must be a string"]),
        ("[model]\ntied = 1", ["model.tied must be true or false"]),
        ("[training]\nlr = 'fast'", ["training.lr must be a number", "'fast' (a string)"]),
        ("[pipeline]\nsplit = 4", ["pipeline.split must be a list of whole numbers"]),
        ("[pipeline]\nsplit = [1, 2.0]", ["pipeline.split must be a list of whole numbers"]),
        ("[coordinator]\nadvertise = [1]", ["coordinator.advertise must be a list of strings"]),
        ("[run]\nname = 1979-05-27", ["run.name must be a string", "(date)"]),
        ("[run\nsteps = 3", ["not valid TOML", "line 1"]),
        ("[run]\nsteps = 3\nsteps = 4", ["not valid TOML"]),
        ('[data]\npath = "C:\\Users\\me\\a.txt"', ["not valid TOML", "single quotes"]),
        ("[run]\nname = \u201cx\u201d", ["not valid TOML", "LEFT DOUBLE QUOTATION MARK (U+201C)"]),
        ("[run]\nst\u0435ps = 3", ["not valid TOML", "CYRILLIC SMALL LETTER IE (U+0435)"]),
        ("[run]\nsteps\u00a0= 3", ["not valid TOML", "NO-BREAK SPACE (U+00A0)"]),
        (f"[run]\nsteps = {'9' * 5000}", ["not valid TOML: a number in it has thousands of digits"]),
        (f"[run]\nsteps = 0x{'f' * 5000}", ["run.steps must be a whole number of at most 64 bits"]),
        (f"[training]\nlr = {'9' * 400}", ["training.lr must be a number of at most 64 bits"]),
        (f"[pipeline]\nsplit = [1, {'9' * 400}]", ["must be a list of whole numbers of at most 64 bits"]),
        ("[model]\nrope_low = nan", ["model.rope_low must be a finite number"]),
        ("[pipeline]\nmin_bits = inf", ["pipeline.min_bits must be a finite number"]),
        ("[data]\nsources = ['a']\nweights = [-inf]", ["data.weights must be a list of finite numbers"]),
        (f"[pipeline]\nsplit = [[0x{'f' * 5000}]]", ["pipeline.split must be a list", "... (a list)"]),
        (f"[pipeline]\nsplit = {'[' * 3000}", ["not valid TOML: hundreds of brackets"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_unusable_input_is_named_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for word in words:
        assert word in message


def test_no_more_faults_are_looked_for_than_anybody_reads(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\n" + "\n".join(f"name{n} = 1" for n in range(30_000)))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).endswith(f"(and {MOST_WRONG - 8} more)")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 0\)"):
        load_config(binary)


def test_a_byte_order_mark_in_a_file_is_ignored(tmp_path: Path) -> None:
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf[run]\nsteps = 7\nname = 'x'\n[training]\nwarmup_steps = 1\n")
    assert load_config(marked).run.steps == 7


def test_a_run_keeps_its_text_whatever_folder_it_is_resumed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    path = write(tmp_path, "[data]\npath = 'texts/a.txt'\ntokenizer = '~/bpe'")
    config = with_absolute_paths(load_config(path))
    assert config.data.path == str(tmp_path / "texts" / "a.txt")
    assert config.data.tokenizer == "/home/someone/bpe"
    assert with_absolute_paths(config) == config
    assert with_absolute_paths(RunConfig()) == RunConfig()
    moved = change_config(config, ["data.path=b.txt"], ["data.path"])
    assert moved.data.path == str(tmp_path / "b.txt")
    assert change_config(config, ["data.path=stdlib"], ["data.path"]).data.path == "stdlib"


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer"])
def test_the_home_of_nobody_is_named(key: str) -> None:
    config = default_config([f"{key}=~nosuchuser/x.txt"])
    words = f"^{key} '~nosuchuser/x.txt': this machine knows no home directory of that user"
    with pytest.raises(ConfigError, match=words):
        with_absolute_paths(config)
    with pytest.raises(ConfigError, match=words):
        change_config(default_config(), [f"{key}=~nosuchuser/x.txt"], ["data"])


@each(
    ("override", "expected"),
    [
        ("training.lr=3e-4", ("training", "lr", 3e-4)),
        ("training.lr = 1", ("training", "lr", 1.0)),
        ("run.steps=7", ("run", "steps", 7)),
        ("run.name=my-run", ("run", "name", "my-run")),
        ("run.name='quoted'", ("run", "name", "quoted")),
        ("run.name=7", ("run", "name", "7")),
        ("data.path=/a b/c=d", ("data", "path", "/a b/c=d")),
        ("model.tied=true", ("model", "tied", True)),
        ("pipeline.split=2,2,3,1", ("pipeline", "split", (2, 2, 3, 1))),
        ("pipeline.split=[2, 6]", ("pipeline", "split", (2, 6))),
        ("pipeline.split=8", ("pipeline", "split", (8,))),
        ("pipeline.split=", ("pipeline", "split", ())),
        ("coordinator.advertise=a:1,b:2", ("coordinator", "advertise", ("a:1", "b:2"))),
    ],
)
def test_overrides_are_read_as_people_type_them(override: str, expected: tuple[str, str, object]) -> None:
    found = parse_override(override)
    assert found == expected
    assert type(found[2]) is type(expected[2])


@each(
    ("override", "words"),
    [
        ("training.lr", "expected section.key=value"),
        ("lr=3", "did you mean training.lr?"),
        ("training.steps=3", "or run.steps?"),
        ("pipeline.codec=tah", "did you mean pipeline.forward_codec or pipeline.backward_codec or"),
        ("trainin.lr=3", "did you mean 'training'?"),
        ("training.lr=fast", "training.lr must be a number"),
        ("training.lr=", "training.lr must be a number, got '' (a string)"),
        ("model.tied=yes", "model.tied must be true or false"),
        ("pipeline.split=2,x", "a list of whole numbers"),
        ("run.steps=1\nb = 2", "run.steps must be a whole number"),
        (f"run.steps={'9' * 5000}", "run.steps must be a whole number"),
        (f"run.steps=0x{'f' * 5000}", "run.steps must be a whole number of at most 64 bits"),
        (f"training.lr={'9' * 400}", "training.lr must be a number of at most 64 bits"),
        (f"pipeline.split={'[' * 3000}", "pipeline.split must be a list of whole numbers"),
    ],
)
def test_bad_overrides_are_named(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(override)
    assert words in str(caught.value)
    assert repr(override) in str(caught.value)


def test_overrides_win_and_the_last_wins_most(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nsteps = 50")
    assert load_config(path, ["run.steps=60", "run.steps=70", "run.seed=5"]).run.steps == 70


def test_rules_are_checked_after_the_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\nglobal_batch = 6\nmicrobatch = 4")
    with pytest.raises(ConfigError, match="must be a multiple of training"):
        load_config(path)
    assert load_config(path, ["training.microbatch=3"]).microbatches == 2


def test_a_recipe_is_found_by_its_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes() == ("demo", "mixture", "muon", "several-gpus", "several-machines")
    config = load_config("several-gpus", ["run.steps=7"])
    assert (config.run.name, config.run.steps) == ("several-gpus", 7)
    assert config.training.precision == "bfloat16" and config.data.tokenizer == "bytes"
    Path("several-gpus").write_text("[run]\nname = 'mine'\n")
    assert load_config("several-gpus").run.name == "mine"
    with pytest.raises(ConfigError, match="did you mean 'several-gpus'"):
        recipe("severl-gpus")
    with pytest.raises(ConfigError, match=r"thinwire config init .*demo"):
        load_config("absent.toml")


def test_the_resolved_config_survives_json_and_toml(tmp_path: Path) -> None:
    for path in RUN_FILES:
        config = load_config(path)
        assert from_json(to_json(config)) == config
        assert load_config(write(tmp_path, to_toml(config))) == config
    assert "\n" not in to_json(config)


def test_keys_that_a_stored_run_lacks_have_their_defaults() -> None:
    config = default_config(["training.lr=0.5"])
    stored = json.loads(to_json(config))
    del stored["training"]["muon_iterations"], stored["sync"]
    assert stored_config(json.dumps(stored)) == config
    stored["training"]["gone"] = 1
    with pytest.raises(ConfigError, match="'gone'"):
        stored_config(json.dumps(stored))


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])))
def test_any_string_survives_toml(text: str) -> None:
    assert tomllib.loads(f"value = {toml_value(text)}") == {"value": text}


@given(st.floats(allow_nan=False))
def test_any_float_survives_toml(number: float) -> None:
    assert tomllib.loads(f"value = {toml_value(number)}") == {"value": number}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw["run"].pop("seed"), "run.seed is missing"),
        (lambda raw: raw.pop("model"), "model.family is missing"),
        (lambda raw: raw["run"].update(speed=3), "unknown key 'speed' in [run]; did you mean 'seed'?"),
        (lambda raw: raw["run"].update(seed="x"), "run.seed must be a whole number"),
        (lambda raw: raw.update(extra={}), "unknown section [extra]"),
        (lambda raw: raw["model"].update(heads=7), "must be a multiple of model.heads (7)"),
    ],
)
def test_json_from_another_version_is_refused(change: Callable[[dict[str, Any]], object], words: str) -> None:
    raw = json.loads(to_json(RunConfig()))
    change(raw)
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(raw))
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_json_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the run's resolved config"):
        from_json(text)


def test_every_field_has_a_type_that_can_be_read() -> None:
    for name, section in section_types().items():
        for field, value in vars(section()).items():
            key = field.rstrip("_")  # `from` is a keyword
            assert parse_override(f"{name}.{key}={toml_value(value)}") == (name, key, value)


def test_lengths_in_tokens_become_steps() -> None:
    overrides = ["training.global_batch=4", "model.sequence=256", "run.tokens=1_000_000"]
    config = default_config([*overrides, "training.warmup_tokens=10240", "training.decay_tokens=1025"])
    assert config.tokens_per_step == 1024
    assert (config.run.steps, config.training.warmup_steps, config.training.decay_steps) == (977, 10, 2)
    assert from_json(to_json(config)) == config


def test_a_length_in_steps_after_the_command_counts_before_one_in_tokens_in_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, "[run]\ntokens = 9_000_000\n[training]\nwarmup_tokens = 90_000\ndecay_tokens = 90_000"
    )
    config = load_config(path, ["run.steps=50", "training.warmup_steps=4", "training.decay_steps=6"])
    assert (config.run.steps, config.training.warmup_steps, config.training.decay_steps) == (50, 4, 6)
    assert load_config(path, ["run.steps=50", "run.tokens=409_600"]).run.steps == 100
    assert from_json(to_json(config)) == config


@pytest.mark.timeout(10)
def test_a_file_that_sets_nothing_or_one_length_twice_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_config(write(tmp_path, "[run]\ntokens = 9_000_000\n[training]\nwarmup_steps = 4"))
    assert not caplog.records
    load_config(write(tmp_path, "[run]\nsteps = 40\ntokens = 9_000_000"))
    assert "run.tokens = 9000000 counts, and not steps = 40" in caplog.text
    assert load_config(write(tmp_path, "# [run]\n")) == default_config([])
    assert "sets nothing" in caplog.text


def test_paths_of_sources_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(default_config(["data.sources=a.jsonl,b", "data.weights=0.3,0.7"]))
    assert config.data.sources == (str(tmp_path / "a.jsonl"), str(tmp_path / "b"))
    assert config.data.weights == (0.3, 0.7) and config.data.chat_template == ""


def test_a_warm_up_longer_than_the_run_is_cut_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = default_config(["run.steps=50", "training.warmup_steps=200"])
    assert config.training.warmup_steps == 5
    assert "training.warmup_steps = 200 is cut to 5" in caplog.text


def test_a_decay_that_the_schedule_does_not_have_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    default_config(["training.decay_steps=50", "training.schedule=wsd"])
    assert not caplog.records
    default_config(["training.decay_tokens=50000"])
    assert "training.decay_steps = 13 has no effect" in caplog.text


def test_muon_for_a_checkpoint_or_for_adapters_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    default_config(["training.optimizer=muon"])
    assert not caplog.records
    checkpoint = [f"model.from={tmp_path}", "data.tokenizer=bytes"]
    for adapters in ("0", "4"):
        default_config(["training.optimizer=muon", *checkpoint, f"lora.rank={adapters}"])
    assert len(caplog.records) == 2
    default_config(checkpoint)
    assert len(caplog.records) == 2


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\nlrr = 1\nclip = "x"\n[piepline]\nstages = 2\n[run]\nsteps = 5\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}: unknown key 'lrr' in [training]; did you mean 'lr'?; "
        "also: training.clip must be a number, got 'x' (a string); "
        "also: unknown section [piepline]; did you mean 'pipeline'?"
    )
    path.write_text("[training]\nlrr = 1\nclip = -1.0\nwarmup_steps = 9\n[run]\nsteps = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["pipeline.stages=x", "run.steps=5"])
    name, value, rule = str(caught.value).removeprefix(f"{path}: ").split("; also: ")
    assert "'lrr'" in name and "pipeline.stages must be" in value and "training.clip" in rule
    path.write_text("[pipeline]\nstages = 3\nsplitt = [1, 2, 1]\n[model]\nlayers = true\n[run]\nname = ''\n")
    with pytest.raises(ConfigError) as caught:  # what follows from a value that is not known is no problem
        load_config(path)
    split, layers, rule = str(caught.value).split("; also: ")
    assert "'splitt'" in split and "model.layers" in layers and "run.name" in rule
    path.write_text("[training]\nlr = -1.0\nclip = -1.0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    first, second = str(caught.value).split("; also: ")
    assert "training.lr" in first and "training.clip" in second


def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    """Rather than trained on bytes; with tables in two files or SentencePiece's alone it has one."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = ModelSection(layers=4, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=300)
    (folder / "config.json").write_text(json.dumps(write_config(model, "float32")))
    run = write(tmp_path, f'[model]\nfrom = "{folder}"\nsequence = 32\n')
    with pytest.raises(ConfigError, match=r"has no tokenizer \(tokenizer\.json, .*set data\.tokenizer"):
        load_config(run)
    assert load_config(run, ["data.tokenizer=bytes"]).data.tokenizer == "bytes"
    (folder / "tokenizer.model").write_bytes(byte_pieces())
    assert load_config(run).data.tokenizer == str(folder)
    (folder / "config.json").write_text(json.dumps(write_config(replace(model, vocab=32000), "float32")))
    with pytest.raises(DataError, match=r"tokenizer\.model has 258 tokens, but the model has 32000"):
        load_config(run)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text("{}")
    assert load_config(run).data.tokenizer == str(folder)


GB = 10**9
CONFIG = RunConfig(
    model=ModelSection(layers=8, hidden=256, sequence=512),
    training=TrainingSection(global_batch=32, microbatch=1),
    pipeline=PipelineSection(stages=4),
)


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def test_auto_is_the_default_of_a_run_file() -> None:
    assert default_config().pipeline.window == "auto"
    assert default_config().pipeline.first_window == 0


@pytest.mark.parametrize("window", ["auto", 0, 7])
def test_both_forms_survive_every_way_in_and_out(tmp_path: Path, window: int | str) -> None:
    written = f'"{window}"' if window == "auto" else window
    config = load(tmp_path, f"[pipeline]\nwindow = {written}\n")
    assert config.pipeline.window == window
    assert load(tmp_path, "", f"pipeline.window={window}") == config
    assert from_json(to_json(config)) == config
    assert load(tmp_path, to_toml(config)) == config
    assert config.pipeline.first_window == (0 if window == "auto" else window)


@pytest.mark.parametrize("wrong", ['"wide"', "1.5", "true", "[1]"])
def test_anything_else_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r'pipeline\.window must be a whole number or "auto"'):
        load(tmp_path, f"[pipeline]\nwindow = {wrong}\n")
    with pytest.raises(ConfigError, match=r'pipeline\.window must be a whole number or "auto"'):
        load(tmp_path, "", f"pipeline.window={wrong}")


@pytest.mark.parametrize("devices", [Devices(), Devices(on_cpu=False)], ids=["CPU", "GPU with graphs"])
def test_held_activations_fit_the_estimate(devices: Devices) -> None:
    """As many as fit and not one more: the estimate of a schedule that holds them says so."""
    stages, memory = 4, (3 * GB // 2 if devices.on_cpu else GB)
    most = most_held(CONFIG, stages, [memory] * stages, devices=[devices] * stages)
    assert 4 < most[0] < 32
    for stage in range(stages - 1):
        for window in range(33):
            pipeline = replace(CONFIG.pipeline, window=window)
            held = held_activations(schedule(stages, 1, CONFIG.microbatches, window)[stage])
            need = stage_bytes(replace(CONFIG, pipeline=pipeline), stages, devices)[stage]
            assert (held <= most[stage]) == (need <= 0.8 * memory)


def test_the_last_stage_holds_one_whatever_the_window() -> None:
    assert most_held(CONFIG, 4, [2 * GB] * 4)[3] == 1


def test_without_memory_to_spare_window_zero_is_left() -> None:
    least = tuple(held_activations(order) for order in schedule(4, 1, CONFIG.microbatches, 0))
    assert most_held(CONFIG, 4, [0, 0, 0, 0]) == least


def test_the_run_file_may_allow_less_than_nodes_have() -> None:
    wide = most_held(CONFIG, 4, [64 * GB] * 4)
    bounded = replace(CONFIG, pipeline=replace(CONFIG.pipeline, window_gb=0.2))
    narrow = most_held(bounded, 4, [64 * GB] * 4)
    assert 4 < narrow[0] < wide[0]
