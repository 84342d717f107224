"""The estimate of a whole run on given machines, a run file that fits them, and the pace of a step."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.main import main
from node.config.schema import (
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    SnapshotsSection,
    TrainingSection,
)
from node.display.explain import explanation_text
from node.run_file.loader import load_config, recipe, recipes
from node.schedule.floor import LinkRate, Network, PipelineStep
from node.schedule.schedule import Kind, schedule
from node.schedule.simulation import simulate
from node.telemetry.format import bytes_text
from node.tuning.block_times import BlockTimes
from node.tuning.memory import COMPILED_CODEC_BYTES, expected_bytes, stage_memory
from node.tuning.snapshot_place import last_snapshot_bytes
from node.view.explain import explain, text_plan
from node.view.first_run import MUON_RATE, MUON_WIDTHS, RATES, TOKENS_A_PARAMETER, Text, first_run, run_file
from node.view.machines import (
    CARDS,
    PAYLOAD_SHARE,
    Card,
    Machine,
    machines_for,
    measured_machine,
    parse_machine,
)
from node.view.totals import (
    ACKNOWLEDGED,
    MOST_PASSES,
    REACHED,
    acknowledgements,
    better_codecs,
    codec_advice,
    lines_of,
    machine_bytes,
    order_advice,
    simulated,
    snapshots_need,
    totals,
)
from wire.errors import UserError

CONFIG = RunConfig(
    model=ModelSection(layers=8, hidden=256, heads=4, kv_heads=4, ffn=512, sequence=256),
    training=TrainingSection(global_batch=32, microbatch=2),
    pipeline=PipelineSection(stages=4),
)


def test_a_middle_machine_uploads_both_ways_on_one_line() -> None:
    explained = explain(CONFIG)
    loads = machine_bytes(explained)
    sent = {(flow.sender, flow.what): flow.bytes for flow in explained.flows}
    assert loads[1].up == loads[2].up == sent[1, "activation"] + sent[1, "gradient"]
    assert (loads[0].up, loads[3].up) == (sent[0, "activation"], sent[3, "gradient"])
    tokens = 4 * explained.tokens_per_step
    assert sum(load.up for load in loads) == sum(load.down for load in loads) - 2 * tokens


@pytest.mark.parametrize("mbit", [2.0, 10.0, 50.0])
def test_a_step_takes_as_long_as_the_fullest_upload(mbit: float) -> None:
    """With time to fill and drain the pipeline on top, a small part of 16 microbatches, and what runs
    do not reach."""
    machine = Machine(name="h100", card=CARDS["h100"], up_mbit=mbit)
    explained = explain(CONFIG)
    found = totals(explained, [machine] * 4)
    upload = machine_bytes(explained)[1].up * 8 / (mbit * 1e6 * PAYLOAD_SHARE)
    assert str(found.floor.binds) in ("upload of stage 1", "upload of stage 2")
    assert upload <= found.floor.seconds <= 1.3 * upload
    assert 1 <= found.seconds * REACHED / found.floor.seconds < 1.05
    assert found.between == pytest.approx((found.seconds, found.seconds)), "no CPU's speed is in it"
    assert found.run_seconds == found.seconds * CONFIG.run.steps


def test_a_slow_card_sets_the_pace_on_a_fast_line() -> None:
    slow = Machine(name="x", card=Card(0.5, 8), up_mbit=1000)
    fast = replace(slow, card=CARDS["h100"])
    found = totals(explain(CONFIG), [fast, slow, fast, fast])
    assert str(found.floor.binds) == "compute of stage 1"


def test_a_cpu_of_unknown_speed_is_uncertain_until_it_is_measured() -> None:
    explained = explain(CONFIG)
    cpus = machines_for(4, [parse_machine("cpu,1000")])
    found = totals(explained, cpus)
    fast, slow = found.between
    # Compute binds here.
    assert fast == pytest.approx(found.seconds / 2, rel=0.1) and slow == pytest.approx(
        2 * found.seconds, rel=0.1
    )
    block = BlockTimes(
        **dict.fromkeys(("attention", "attention_output", "ffn_input", "out_rate", "in_rate"), 1.0),
        forward=0.1,
        backward=0.15,
        measured=True,
    )
    measured = totals(explained, [measured_machine(cpu, CONFIG, block) for cpu in cpus])
    assert measured.between == (measured.seconds, measured.seconds)
    # Two blocks a stage, 16 microbatches, and the time of three more to fill and drain the pipeline.
    assert measured.seconds * REACHED == pytest.approx(0.25 * 2 * (16 + 3), rel=0.1)


def test_what_a_cpu_is_expected_to_take_is_less_than_the_most() -> None:
    explained = explain(CONFIG)
    found = totals(explained, machines_for(4, [parse_machine("cpu,4")]))
    assert all(least < most for least, most in zip(found.memory, found.most_memory, strict=True))
    # A wider window holds more, but at the last stage; plain codecs need nothing compiled.
    few, more = (expected_bytes(CONFIG, 4, window) for window in (0, 2))
    assert few[0] < more[0] and few[3] == more[3]
    pipeline = replace(CONFIG.pipeline, forward_codec="bf16", backward_codec="bf16")
    plain = expected_bytes(replace(CONFIG, pipeline=pipeline), 4, 0)
    assert {a - b for a, b in zip(few, plain, strict=True)} == {COMPILED_CODEC_BYTES}
    # Bounds know of malloc's share where a snapshot's copies are less.
    held = stage_memory(replace(CONFIG, training=replace(CONFIG.training, microbatch=8)), 4)[0]
    assert held.unreturned > held.snapshot
    assert held.total == held.fixed + held.state + held.workspaces + held.unreturned + held.step
    cards = totals(explained, machines_for(4, [parse_machine("h100,4")]))
    assert cards.memory == cards.most_memory
    assert cards.memory[3] == explained.memory[3].gpu.total


def test_a_codec_without_a_cost_in_loss_is_named_where_it_costs_no_time() -> None:
    explained = explain(CONFIG)
    card = Machine(name="rtx 4090", card=CARDS["rtx 4090"], up_mbit=20)
    advice = codec_advice(explained, [card] * 4)
    assert advice is not None and "where tah cost 1.4 %" in advice
    better = better_codecs(explained, [card] * 4)
    assert better is not None
    assert better.config.pipeline.first_codecs == ("trellis-4.41", "trellis-4.41")
    assert f"pipeline.backward_codec = {better.config.pipeline.backward_codec}" in advice
    assert better_codecs(better, [card] * 4) is None, "one change is enough"
    cpu = Machine(name="cpu", card=CARDS["cpu"], up_mbit=1000)
    assert codec_advice(explained, [cpu] * 4) is None, "a core packs it too slowly"
    other = replace(CONFIG, pipeline=replace(CONFIG.pipeline, forward_codec="bf16", backward_codec="fixed-4"))
    assert codec_advice(explain(other), [card] * 4) is None


def test_a_better_order_of_the_machines_is_named_with_its_split() -> None:
    fast = Machine(name="h100", card=CARDS["h100"], up_mbit=1000, down_mbit=1000)
    slow = replace(fast, name="rtx 3060", card=CARDS["rtx 3060"])
    wide = replace(CONFIG, model=replace(CONFIG.model, layers=12))
    explained = explain(wide)
    given = [fast, slow, fast, fast]
    advice = order_advice(explained, given)
    assert advice is not None and "pipeline.split = [" in advice and "let them join in that order" in advice
    split = tuple(map(int, advice.partition("[")[2].partition("]")[0].split(", ")))
    named = advice.partition("order ")[2].partition(" makes")[0].split(", ")
    by_name = {str(machine): machine for machine in given}
    placed = [by_name[name] for name in named]
    assert sum(split) == 12 and split[placed.index(slow)] == 1
    other = explain(replace(wide, pipeline=replace(wide.pipeline, split=split)))
    assert totals(other, placed).seconds < 0.98 * totals(explained, given).seconds
    # Of equal machines no order is better.
    assert order_advice(explained, [fast] * 4) is None


def test_disk_that_snapshots_take() -> None:
    one, most = snapshots_need(CONFIG)
    assert one == pytest.approx(12 * explain(CONFIG).parameters, rel=1e-3)
    assert most == (CONFIG.run.keep_snapshots + 1) * one
    measured = replace(CONFIG, data=DataSection(valid_every=10))
    assert snapshots_need(measured) == (one, most + one)
    assert last_snapshot_bytes(CONFIG) == one
    without_moments = replace(CONFIG, snapshots=SnapshotsSection(last="weights"))
    assert last_snapshot_bytes(without_moments) * 3 == pytest.approx(one, rel=1e-3)
    text = explanation_text(explain(without_moments))
    assert f"only weights: {bytes_text(last_snapshot_bytes(without_moments))}" in text
    assert "only weights" not in explanation_text(explain(CONFIG))


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [("RTX 4090", float("inf"), float("inf")), ("cpu,10", 10, float("inf")), ("l4, 20/100 mbit", 20, 100)],
)
def test_machines_are_read(text: str, up: float, down: float) -> None:
    machine = parse_machine(text.replace(" mbit", "mbit"))
    assert (machine.up_mbit, machine.down_mbit) == (up, down)


def test_an_unknown_card_is_described_by_its_figures() -> None:
    assert parse_machine("40tflops,16gb,20").card == Card(40, 16)
    assert [machine.name for machine in machines_for(3, [parse_machine("l4"), parse_machine("a10")])] == [
        *("l4", "a10", "a10")
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rtx 4091", "did you mean 'rtx 4090'"),
        ("rtx 4090,fast", "'fast' is not a number above 0"),
        ("rtx 4090,0", "is not a number above 0"),
        ("rtx 4090,20,30", "expected CARD,UP or CARD,UP/DOWN"),
        ("", "no such card"),
    ],
)
def test_a_machine_that_cannot_be_read_says_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_machine(text)


def test_the_largest_model_that_sees_enough_tokens(tmp_path: Path) -> None:
    def chosen(machine: str, days: float, text: Text | None = None) -> RunConfig:
        found = first_run([parse_machine(machine)] * 4, days=days, text=text)
        path = tmp_path / "run.toml"
        path.write_text(run_file(found))
        config = load_config(path)
        assert config == found.config, "the file says what was worked out"
        return config

    slow, fast, large = chosen("rtx 4090,10", 7), chosen("rtx 4090,100", 7), chosen("h100,1000", 30)
    assert slow.model.hidden < fast.model.hidden < large.model.hidden
    for config in (slow, fast, large):
        by_muon = config.training.optimizer == "muon"
        assert by_muon == (config.model.hidden in MUON_WIDTHS)
        assert config.training.lr == RATES[config.model.hidden] * (MUON_RATE if by_muon else 1)
    for config in (slow, fast):
        assert config.run.steps * config.tokens_per_step > TOKENS_A_PARAMETER * explain(config).parameters
    assert chosen("cpu,100", 7).training.precision == "float32"
    assert fast.training.precision == "bfloat16"
    # A card without bfloat16 among others: all compute in float16, and the loss is scaled.
    mixed = first_run([parse_machine("rtx 2080 ti,100"), *[parse_machine("rtx 4090,100")] * 3], days=7)
    assert mixed.config.training.precision == "float16" and mixed.config.training.gradients == "float32"
    assert "a card here has no bfloat16" in run_file(mixed)
    (tmp_path / "mixed.toml").write_text(run_file(mixed))
    assert load_config(tmp_path / "mixed.toml") == mixed.config
    little = chosen("rtx 4090,100", 7, Text(tokens=10_000_000))
    assert little.run.steps * little.tokens_per_step <= 40_000_000
    with pytest.raises(UserError, match="no model fits 4 such machines"):
        chosen("10tflops,0.2gb", 7)


def test_from_machines_to_a_run_file_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has what `config explain` advises: it has nothing to add."""
    path = tmp_path / "new.toml"
    cards = ["rtx 4090,20/100", "rtx 3060,10/50", "rtx 3060,20/100"]
    asked = ["config", "init", str(path), *(word for card in cards for word in ("--machine", card))]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "a step takes about" in said and f"thinwire coordinator {path}" in said
    assert "stdlib is only an example" in said
    (line,) = (line for line in said.splitlines() if "thinwire config explain" in line)
    config = load_config(path)
    assert config.pipeline.stages == len(config.pipeline.split) == 3
    assert config.pipeline.first_codecs == ("trellis-4.41", "trellis-4.41")
    words = shlex.split(line.partition("thinwire ")[2])
    placed = [parse_machine(word) for word in words[4::2]]
    assert sorted(words[4::2]) == sorted(cards) and placed != [parse_machine(card) for card in cards]
    explained = explain(config)
    assert codec_advice(explained, placed) is None and order_advice(explained, placed) is None
    assert main(words) == 0
    assert "add little" not in capsys.readouterr().out
    assert main(asked) == 2, "it replaces no file"
    assert main(["config", "init", str(tmp_path / "x.toml"), "--recipe", "one", "--machine", "cpu,1"]) == 2
    assert main(["config", "init", str(tmp_path / "x.toml"), "--machine", "typewriter"]) == 2
    assert "no such card" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("card", "count", "base", "precision"),
    [
        ("h100,1000", 4, "bf16", "bfloat16"),
        ("rtx 4090,100", 4, "8", "bfloat16"),
        ("rtx 4090,100", 8, "bf16", "bfloat16"),
        ("40tflops,12gb,100", 4, "3", "bfloat16"),
        ("t4,100", 6, "8", "float16"),
    ],
)
def test_a_mixture_is_written_for_the_machines_that_are_given(
    tmp_path: Path, card: str, count: int, base: str, precision: str
) -> None:
    path = tmp_path / "new.toml"
    asked = ["config", "init", str(path), "--recipe", "mixture"]
    assert main([*asked, *(word for _ in range(count) for word in ("--machine", card))]) == 0
    config = load_config(path)
    assert (config.pipeline.stages, config.lora.base) == (count, base)
    assert config.training.precision == precision
    balance = 0.0 if precision == "float16" else 0.001
    assert config.model == replace(load_config(recipe("mixture")).model, balance_loss=balance)
    assert codec_advice(explain(config), machines_for(count, [parse_machine(card)])) is None


@pytest.mark.parametrize(("card", "count"), [("rtx 3060,100", 1), ("rtx 4090,100", 49)])
def test_a_mixture_is_not_written_for_too_few_or_too_many_machines(
    tmp_path: Path, card: str, count: int
) -> None:
    path = tmp_path / "new.toml"
    asked = ["config", "init", str(path), "--recipe", "mixture"]
    assert main([*asked, *(word for _ in range(count) for word in ("--machine", card))]) == 2
    assert not path.exists()


def test_a_recipe_is_written_for_the_text_that_is_given(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A line of text, as long as any.\n" * 40_000)
    for name in recipes():
        path = tmp_path / f"{name}.toml"
        assert main(["config", "init", str(path), "--recipe", name, "--data", str(text)]) == 0
        before, config = load_config(recipe(name)), load_config(path)
        if not before.lora.rank:
            assert (before.data.path, before.data.tokenizer, before.model.vocab) == ("stdlib", "bytes", 256)
        assert (config.data.path, config.data.tokenizer) == (str(text), "bytes")
        passes = text_plan(config, print).passes
        assert passes <= MOST_PASSES and (passes > 3 or config.run.steps == before.run.steps)
        kept = replace(before, run=config.run, data=config.data, training=config.training)
        assert config == kept, "all else is the recipe's"
        assert [line for line in path.read_text().splitlines() if line.startswith("#")] == [
            line for line in recipe(name).read_text().splitlines() if line.startswith("#")
        ]


def test_explain_gives_totals_and_fails_on_text_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nsteps = 100000\n[model]\nlayers = 4\n")
    assert main(["config", "explain", str(path), "--machine", "rtx 4090,20"]) == 0
    said = capsys.readouterr().out
    for words in (
        "a machine's links share its line",
        "100000 steps take",
        "snapshots take",
        "add little",
    ):
        assert words in said
    assert "run.keep_best" not in said
    assert main(["config", "explain", str(path), "data.valid_every=300"]) == 0
    assert "run.keep_best: one more at each new best of 334 measurements" in capsys.readouterr().out
    assert main(["config", "explain", str(path), "--json", "--machine", "rtx 4090,20"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["run_seconds"] == pytest.approx(100_000 * whole["step_seconds"])
    assert len(whole["machines"]) == 4
    assert main(["config", "explain", str(path), f"data.path={tmp_path / 'absent.txt'}"]) == 2
    said = capsys.readouterr()
    assert "in total:" in said.out and "absent.txt" in said.err


def test_cpus_may_be_as_fast_as_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nhidden = 64\nheads = 2\nkv_heads = 2\nffn = 128\nsequence = 32\n")
    asked = ["config", "explain", str(path), "--machine", "cpu,20"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "twice or half as fast, a step takes" in said and "expected in steps" in said
    assert main([*asked, "--measure"]) == 0
    said = capsys.readouterr().out
    assert "a step takes about" in said and "twice or half" not in said
    assert main(["config", "explain", str(path), "--machine", "l4,20", "--measure"]) == 2
    assert "give a machine with a CPU, such as --machine cpu,20" in capsys.readouterr().err


WORK = PipelineStep(
    microbatches=24,
    forward=(0.1,) * 4,
    backward=(0.2,) * 4,
    activation_bytes=1e5,
    gradient_bytes=2e5,
    interfaces=(LinkRate(up=5e5, down=5e5),) * 4,
)


def test_the_window_is_the_narrowest_that_is_as_good_as_wider_ones() -> None:
    """On lines that bind transfers need one; on fast lines none."""
    slow, fast = simulated(WORK), simulated(replace(WORK, interfaces=(LinkRate(up=1e9, down=1e9),) * 4))
    assert fast.window == 0 and slow.window > 0
    assert simulated(WORK, 0).seconds > 1.1 * slow.seconds
    assert slow.seconds == pytest.approx(min(simulated(WORK, width).seconds for width in range(9)), rel=0.03)
    for pace, work in ((slow, WORK), (fast, replace(WORK, interfaces=(LinkRate(up=1e9, down=1e9),) * 4))):
        assert 1 <= pace.seconds / work.floor().seconds < 1.15


def test_a_long_step_is_as_busy_in_its_middle() -> None:
    """Not all of it is simulated."""
    long = replace(WORK, microbatches=64)
    orders = schedule(4, 1, 64, 8)
    whole = simulate(
        orders,
        0.1,
        0.2,
        network=Network(4, [], WORK.interfaces),
        sizes={Kind.FORWARD: WORK.activation_bytes, Kind.BACKWARD: WORK.gradient_bytes},
        swap=True,
    )
    assert simulated(long, 8).seconds == pytest.approx(whole.total, rel=0.03)


def test_what_follows_the_last_backward_is_added() -> None:
    for count in (8, 200):
        work = replace(WORK, microbatches=count)
        assert simulated(replace(work, after_seconds=7.0)).seconds == simulated(work).seconds + 7.0
    alone = replace(WORK, forward=(0.1,), backward=(0.2,), interfaces=WORK.interfaces[:1])
    assert simulated(alone).seconds == pytest.approx(24 * 0.3)


def test_acknowledgements_take_their_part_of_a_slow_line() -> None:
    assert [acknowledgements(mbit) for mbit, _ in ACKNOWLEDGED] == [share for _, share in ACKNOWLEDGED]
    assert acknowledgements(1) == acknowledgements(10) > acknowledgements(30) > acknowledgements(1000) > 0
    machine = parse_machine("cpu,4/40")
    both, only_up = lines_of([machine] * 2, [(1e6, 1e6), (1e6, 0)])
    assert only_up.up == machine.up and both.up == pytest.approx(machine.up / 1.04)
