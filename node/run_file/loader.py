"""Reads run files: TOML and `key=value` overrides give a checked `RunConfig`; also writes it as JSON and
TOML.

Reading is strict. An unknown section or key is an error that names the nearest one, and a value of the wrong
type is an error that names the expected type. Only two conversions are made: a whole number to a float, and a
list to a tuple.
"""

import json
import logging
import math
import re
import shlex
import tomllib
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from keyword import iskeyword
from pathlib import Path
from typing import Any, get_type_hints

from node.config.schema import DataSection, Every, RunConfig, Window
from node.data.text import expanded
from node.run_file.validate import problems, together, validate
from node.telemetry.format import parse_duration
from wire.errors import ConfigError, close_to, nearest, shortened

log = logging.getLogger(__name__)

_RECIPES = Path(__file__).with_name("recipes")

EXPECTED = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, ...]: "a list of numbers",
    tuple[str, ...]: "a list of strings",
    Window: 'a whole number or "auto"',
    Every: 'a whole number of steps, or a time such as "10 min"',
}
"""The types of schema fields, in words."""

PATHS = {
    ("data", "path"): "stdlib",
    ("data", "valid"): "",
    ("data", "sources"): "stdlib",
    ("data", "tokenizer"): "bytes",
    ("data", "chat_template"): "",
    ("model", "from"): "",
}
"""Keys that name files or folders, and the word that each accepts instead."""

EXPECTED_LISTS = (tuple[int, ...], tuple[float, ...], tuple[str, ...])
HUB = "hf://"
"""The prefix of a `model.from` that names a repository of the hub."""

MOST_TOML_BYTES = 1 << 20
"""The most bytes of a TOML file."""
MOST_WRONG = 1000
"""After this many errors in a file, no more are looked for."""
INTEGER_BITS = 64
"""The bits of TOML's whole numbers. Python's have any length."""

LENGTHS = {
    ("run", "steps"): "tokens",
    ("training", "warmup_steps"): "warmup_tokens",
    ("training", "decay_steps"): "decay_tokens",
}
"""Lengths in steps, and the keys that give the same lengths in tokens."""

Values = dict[str, dict[str, Any]]
"""Checked values by section and key."""


@dataclass(frozen=True)
class _Read:
    """The sections of a run file whose names and types have been checked."""

    values: Values = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """What is wrong with names and types."""
    doubtful: set[str] = field(default_factory=set)
    """Keys, and sections with their dot, whose values are unknown because of these errors."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file, or a recipe by its name, apply overrides such as `training.lr=3e-4`, and check
    everything.

    Raises:
        ConfigError: in one line that names the file or the override, the key and what was expected.
    """
    path = Path(path)
    if path.name == str(path) and str(path) in recipes() and not path.exists():
        path = recipe(str(path))
    samples = f"thinwire config init {shlex.quote(str(path))} --recipe NAME (one of {', '.join(recipes())})"
    read = _read_sections(read_toml(path, "run file", samples))
    if read.wrong:
        more = _further_problems(read, overrides) if len(read.wrong) < MOST_WRONG else []
        raise ConfigError(f"{path}: {together([*read.wrong, *more])}")
    if not any(read.values.values()):
        log.warning("%s sets nothing: all values are defaults, and %s is trained on", path, DataSection.path)
    for (section, key), tokens in LENGTHS.items():
        given = read.values.get(section, {})
        if key in given and given.get(tokens, 0) > 0:
            log.warning(
                "%s: %s.%s = %d counts, and not %s = %d",
                path,
                section,
                tokens,
                given[tokens],
                key,
                given[key],
            )
    return _overridden(read.values, overrides, where=str(path))


def recipes() -> tuple[str, ...]:
    """The names of the run files that are installed with the program as starting points."""
    return tuple(sorted(path.stem for path in _RECIPES.glob("*.toml")))


def recipe(name: str) -> Path:
    """The file of a recipe. Raises ConfigError for an unknown name."""
    if name not in recipes():
        raise ConfigError(f"no recipe {name!r}{nearest(name, recipes())}")
    return _RECIPES / f"{name}.toml"


def change_config(config: RunConfig, overrides: Sequence[str], changeable: Collection[str]) -> RunConfig:
    """Apply overrides to the config of a run that continues. Paths become absolute.

    An override with the key's present value is no change, because a service repeats its command line.

    Args:
        changeable: the sections and section.keys that may change.

    Raises:
        ConfigError: as for `load_config`, or a key may not change.
    """
    values = to_fields(config)
    for override in overrides:
        section, key, value = parse_override(override)
        value = _absolute(section, key, value)
        if value == values[section][key]:
            continue
        if section not in changeable and f"{section}.{key}" not in changeable:
            raise ConfigError(
                f"override {override!r}: {section}.{key} cannot change once a run has begun; "
                f"what can: {', '.join(changeable)}"
            )
        values[section][key] = value
        if (section, key) in LENGTHS:
            values[section][LENGTHS[section, key]] = 0  # the length that was given last counts
    changed = _build(values)
    validate(changed, where="the changed run file")
    return changed


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The config with absolute paths, so that a run can be resumed from any folder."""
    data = {key: _absolute("data", key, value) for key, value in vars(config.data).items()}
    model = replace(config.model, from_=_absolute("model", "from", config.model.from_))
    return replace(config, data=replace(config.data, **data), model=model)


def default_config(overrides: Sequence[str] = ()) -> RunConfig:
    """The defaults with overrides applied. Raises ConfigError as `load_config`."""
    return _overridden({}, overrides, where="the run file")


def parse_override(text: str) -> tuple[str, str, Any]:
    """Parse one `section.key=value` into (section, key, value of the field's type).

    Strings need no quotes, and lists may be written with commas alone: `pipeline.split=2,2,3,1`.

    Raises:
        ConfigError: the text has another form, the key is unknown, or the value has another type.
    """
    name, equals, raw = text.partition("=")
    name, raw = name.strip(), raw.strip()
    if not equals:
        raise ConfigError(f"override {text!r}: expected section.key=value, for example training.lr=3e-4")
    section, dot, key = name.partition(".")
    if not dot:
        candidates = [full for full in full_keys() if full.endswith(f".{name}")]
        # All keys would be a page.
        known = full_keys() if close_to(name, full_keys()) else section_types()
        hint = f"; did you mean {' or '.join(candidates)}?" if candidates else nearest(name, known)
        raise ConfigError(f"override {text!r}: {name!r} names no section{hint}")
    kind = _field_type(section, key, where=f"override {text!r}")
    value = _parse_override_value(raw, kind)
    return section, key, convert(value, kind, where=f"override {text!r}", name=name)


def to_fields(config: RunConfig) -> Values:
    """The resolved config as values by section and key."""
    # `from` is a keyword of Python, so its field is called `from_`.
    return {
        name: {key.rstrip("_"): value for key, value in vars(getattr(config, name)).items()}
        for name in section_types()
    }


def to_json(config: RunConfig) -> str:
    """The resolved config as one JSON object, every key included."""
    return json.dumps(to_fields(config), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def stored_config(text: str) -> RunConfig:
    """As `from_json`, for a stored run, which an earlier commit may have written. A key that was added since
    has its default, with which the program does what it did before."""
    return _from_json(text, is_whole=False)


def from_json(text: str) -> RunConfig:
    """The inverse of `to_json`. Raises ConfigError for unknown, missing and mistyped keys and for broken
    rules."""
    return _from_json(text, is_whole=True)


def _from_json(text: str, *, is_whole: bool) -> RunConfig:
    where = "the run's resolved config"
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected an object of sections, got {_shown(raw)}")
    read = _read_sections(raw)
    if read.wrong:
        remedy = "" if is_whole else "; use the version of thinwire that stored the run"
        raise ConfigError(f"{where}: {together(read.wrong)}{remedy}")
    values = read.values
    for full in full_keys() if is_whole else ():
        section, _, key = full.partition(".")
        if key not in values.get(section, {}):
            raise ConfigError(f"{where}: {full} is missing; both sides must run the same version of thinwire")
    config = _build(values)
    validate(config, where=where)
    return config


def to_toml(config: RunConfig) -> str:
    """The resolved config as a run file, which `load_config` reads back to an equal config."""
    blocks = []
    for section, values in to_fields(config).items():
        lines = [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML has JSON's escapes, but DEL must be escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)


@cache
def section_types() -> Mapping[str, type]:
    """The schema's sections in order, with the dataclass of each name."""
    return get_type_hints(RunConfig)


@cache
def _key_types(section: str) -> Mapping[str, Any]:
    return {key.rstrip("_"): kind for key, kind in get_type_hints(section_types()[section]).items()}


def full_keys() -> list[str]:
    """Every `section.key` of a run file."""
    return [f"{section}.{key}" for section in section_types() for key in _key_types(section)]


def _build(values: Values) -> RunConfig:
    fields = {
        name: {f"{key}_" if iskeyword(key) else key: value for key, value in section.items()}
        for name, section in values.items()
    }
    return _resolved(
        RunConfig(**{name: cls(**fields.get(name, {})) for name, cls in section_types().items()})
    )


def _resolved(config: RunConfig) -> RunConfig:
    """The config with lengths that are given in tokens converted to steps, rounded up."""
    run, training = config.run, config.training

    def steps(tokens: int, given: int) -> int:
        return -(-tokens // config.tokens_per_step) if tokens > 0 and config.tokens_per_step > 0 else given

    return replace(
        config,
        run=replace(run, steps=steps(run.tokens, run.steps)),
        training=replace(
            training,
            warmup_steps=steps(training.warmup_tokens, training.warmup_steps),
            decay_steps=steps(training.decay_tokens, training.decay_steps),
        ),
    )


def read_toml(path: Path, kind: str, samples: str) -> dict[str, Any]:
    """Parse a TOML file.

    Args:
        kind: what to call the file in messages, such as "run file".
        samples: what has or writes examples.

    Raises:
        ConfigError: the file cannot be read or parsed.
    """
    try:
        if not path.is_file() and not path.is_dir() and path.exists() and not path.is_relative_to("/dev"):
            # Opening a pipe to which nobody writes would never return. A shell's own pipes are in /dev.
            raise ConfigError(f"{path} is no regular file; a {kind} (TOML) is expected here")
        with path.open("rb") as file:
            text = file.read(MOST_TOML_BYTES + 1)
        if len(text) > MOST_TOML_BYTES:
            raise ConfigError(f"{path} has more than {MOST_TOML_BYTES:,} bytes, which no {kind} has")
        # Some editors write a byte order mark, which TOML does not allow.
        return tomllib.loads(text.decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {kind}; to start from one: {samples}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; a {kind} (TOML) is expected here") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        odd = _odd_character(text.decode("utf-8-sig"), str(error))
        raise ConfigError(f"{path} is not valid TOML: {error}{odd}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: a number in it has thousands of digits") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: hundreds of brackets in it are not closed") from error


def _odd_character(text: str, error: str) -> str:
    """Advice on an error of `tomllib` at a character that only looks like one of TOML (a curly quote, a wide
    space or another alphabet's letter), or in a line with backslashes; else empty."""
    place = re.search(r"line (\d+), column (\d+)", error)
    if not place:
        return ""
    line = text.split("\n")[int(place[1]) - 1]
    character = line[int(place[2]) - 1 : int(place[2])]
    if character.isascii():
        return "; write paths with /, or in single quotes" if "\\" in line else ""
    return f"; there is {unicodedata.name(character, 'a character')} (U+{ord(character):04X}): type it again"


def _absolute(section: str, key: str, value: Any) -> Any:
    """The absolute path for keys of `PATHS`; other values unchanged."""
    if isinstance(value, tuple):
        return tuple(_absolute(section, key, item) for item in value)
    if (section, key) not in PATHS or value in ("", PATHS[section, key]) or value.startswith(HUB):
        return value
    absolute = str(expanded(value, f"{section}.{key}").absolute())
    if not is_text(absolute):
        raise ConfigError(f"{section}.{key}: {absolute!r} is not text in UTF-8: rename that folder")
    return absolute


def _overridden(values: Values, overrides: Sequence[str], where: str) -> RunConfig:
    for override in overrides:
        section, key, value = parse_override(override)
        values.setdefault(section, {})[key] = value
        if (section, key) in LENGTHS:
            values[section][LENGTHS[section, key]] = 0  # the length that was given last counts
    given = _build(_with_checkpoint(values))
    config = _with_short_warmup(given)
    validate(config, where=where)
    if config.training.warmup_steps != given.training.warmup_steps:
        log.warning(
            "training.warmup_steps = %d is cut to %d: the run has %d steps",
            given.training.warmup_steps,
            config.training.warmup_steps,
            config.run.steps,
        )
    if config.training.decay_steps and config.training.schedule != "wsd":
        log.warning(
            "training.decay_steps = %d has no effect: training.schedule is %s, not wsd",
            config.training.decay_steps,
            config.training.schedule,
        )
    if config.training.optimizer == "muon" and config.lora.rank > 0:
        log.warning(
            "training.optimizer = muon steps matrices of blocks, and this run trains adapters: set "
            "training.adapter_optimizer = muon for them, or drop it"
        )
    elif config.training.optimizer == "muon" and config.model.from_:
        log.warning(
            "training.optimizer = muon moves all weights of %s, which may lose some of what a checkpoint "
            "that was trained with AdamW knows: keep adamw for it, or train adapters (lora.rank)",
            config.model.from_,
        )
    return config


def _further_problems(read: _Read, overrides: Sequence[str]) -> list[str]:
    """All further problems of a file with wrong names or types, so that one correction is enough.

    Rules that name a key whose value is unknown are left out, because that value may be what breaks them.
    """
    values, wrong, doubtful = (
        {name: dict(section) for name, section in read.values.items()},
        [],
        read.doubtful,
    )
    for override in overrides:
        try:
            section, key, value = parse_override(override)
        except ConfigError as error:
            wrong.append(str(error))
        else:
            values.setdefault(section, {})[key] = value
    if values.get("model", {}).get("from"):
        doubtful = {
            *doubtful,
            "model.",
            "data.tokenizer",
        }  # the checkpoint sets these, and is not read for this
    config = _with_short_warmup(_build(values))
    further = [line for line in problems(config) if not any(name in line for name in doubtful)]
    return [*wrong, *further]


def _with_short_warmup(config: RunConfig) -> RunConfig:
    """Shorten a warm-up that is longer than the run to a tenth of the run."""
    steps, training = config.run.steps, config.training
    if not 0 < steps < training.warmup_steps:
        return config
    cut = max(1, steps // 10)
    return replace(config, training=replace(training, warmup_steps=cut, warmup_tokens=0))


def _with_checkpoint(values: Values) -> Values:
    """The values together with the keys that the checkpoint in `model.from` sets."""
    given = dict(values.get("model", {}))
    if not (name := given.pop("from", "")):
        return values
    from node.state.start import open_source  # its libraries take long to import

    source = open_source(name, given)
    data = dict(values.get("data", {}))
    if not source.tokenizer and "tokenizer" not in data:
        raise ConfigError(
            f"{name} has no tokenizer (tokenizer.json, vocab.json and merges.txt, or tokenizer.model): copy "
            "the model's own beside its weights, or set data.tokenizer to its folder"
        )
    data.setdefault("tokenizer", source.tokenizer)
    return {**values, "model": {**source.model, **given, "from": source.name}, "data": data}


def _read_sections(raw: Mapping[str, Any]) -> _Read:
    read = _Read()
    for section, table in raw.items():
        if len(read.wrong) >= MOST_WRONG:
            break
        if section not in section_types():
            # A key outside its section is the most likely mistake.
            owners = [full for full in full_keys() if full.endswith(f".{section}")]
            if owners and not isinstance(table, dict):
                owner = owners[0].partition(".")[0]
                read.wrong.append(f"key {section!r} is outside its section; put it under [{owner}]")
                read.doubtful.update(owners)
            else:
                read.wrong.append(
                    f"unknown section [{shortened(section)}]{nearest(section, section_types())}"
                )
                read.doubtful.update(f"{near}." for near in close_to(section, section_types()))
        elif not isinstance(table, dict):
            read.wrong.append(f"[{section}] must be a section of keys, got {_shown(table)}")
            read.doubtful.add(f"{section}.")
        else:
            values = read.values[section] = {}
            for key, value in table.items():
                if len(read.wrong) >= MOST_WRONG:
                    break
                try:
                    kind = _field_type(section, key, "")
                    values[key] = convert(value, kind, where="", name=f"{section}.{key}")
                except ConfigError as error:
                    read.wrong.append(str(error).removeprefix(": "))
                    named = key in _key_types(section)
                    alike = [key] if named else close_to(key, _key_types(section))
                    read.doubtful.update(f"{section}.{near}" for near in alike)
                    read.doubtful.update(full for full in full_keys() if full.endswith(f".{key}"))
    return read


OTHER_NAMES = {
    "run.steps": ("max_steps", "num_steps", "num_train_steps", "train_steps", "iterations", "max_iters"),
    "run.tokens": ("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
    "run.snapshot_every": ("save_steps", "save_every", "checkpoint_every"),
    "training.lr": ("learning_rate", "max_lr"),
    "training.global_batch": ("batch_size", "batch", "train_batch_size", "gradient_accumulation_steps"),
    "training.microbatch": ("micro_batch_size", "per_device_train_batch_size"),
    "training.precision": ("bf16", "fp16", "dtype", "torch_dtype", "amp"),
    "training.eps": ("adam_epsilon", "epsilon"),
    "training.clip": ("max_grad_norm", "grad_clip", "gradient_clipping"),
    "training.schedule": ("lr_scheduler", "lr_scheduler_type", "lr_schedule", "scheduler"),
    "model.sequence": (
        "max_position_embeddings",
        "max_seq_length",
        "max_length",
        "context_length",
        "block_size",
        "seq_length",
    ),
    "model.heads": ("num_attention_heads", "n_head", "n_heads"),
    "model.hidden": ("d_model", "hidden_size", "n_embd", "dim"),
    "model.layers": ("num_hidden_layers", "num_layers", "depth"),
    "model.vocab": ("vocab_size",),
    "model.ffn": ("intermediate_size", "d_ff"),
    "model.from": ("model_name_or_path", "base_model", "checkpoint", "pretrained"),
    "data.path": ("dataset", "dataset_name", "train_file", "file", "files"),
    "data.jsonl_field": ("text_column", "text_field", "dataset_text_field", "column"),
    "data.valid": ("validation", "val", "test", "eval_file", "validation_file"),
    "data.valid_every": ("eval_steps", "eval_every", "eval_interval"),
    "pipeline.stages": ("pp", "num_stages", "pipeline_parallel_size"),
    "lora.rank": ("lora_r", "lora_rank"),
    "lora.alpha": ("lora_alpha",),
    "lora.dropout": ("lora_dropout",),
    "lora.targets": ("target_modules", "lora_target_modules"),
}
"""What other programs call a key, all in small letters."""


def _field_type(section: str, key: str, where: str) -> Any:
    if section not in section_types():
        raise ConfigError(
            f"{where}: unknown section [{shortened(section)}]{nearest(section, section_types())}"
        )
    types = _key_types(section)
    if key in types:
        return types[key]
    hint = nearest(key, types)
    longer = any(name.startswith(f"{key}_") for name in types)
    elsewhere = [full for full in full_keys() if full.endswith(f".{key}") and not longer]
    elsewhere = elsewhere or [full for full, names in OTHER_NAMES.items() if key.lower() in names]
    if elsewhere:
        parts = [f"{section}.{name}" for name in types if name.endswith(f"_{key}")]
        hint = f"; did you mean {' or '.join([*parts, *elsewhere])}?"
    raise ConfigError(f"{where}: unknown key {shortened(key)!r} in [{section}]{hint}")


def convert(value: Any, kind: Any, *, where: str, name: str) -> Any:
    """`value` converted to the field type `kind`. Raises ConfigError if it has another type."""
    if any(type(item) is int and item.bit_length() > INTEGER_BITS for item in _items(value)):
        raise ConfigError(f"{where}: {name} must be {EXPECTED[kind]} of at most {INTEGER_BITS} bits")
    if not all(is_text(item) for item in _items(value)):
        raise ConfigError(f"{where}: {name} must be text in UTF-8")
    if any(type(item) is float and not math.isfinite(item) for item in _items(value)):
        raise ConfigError(f"{where}: {name} must be {EXPECTED[kind].replace('number', 'finite number')}")
    if kind is float and type(value) is int:
        return float(value)
    if kind in (str, bool, int, float) and type(value) is kind:
        return value
    if kind == Window and (type(value) is int or value == "auto"):
        return value
    if kind == Every and (type(value) is int or (type(value) is str and parse_duration(value) is not None)):
        return value
    if kind == tuple[int, ...] and isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    if kind == tuple[float, ...] and isinstance(value, list) and all(type(x) in (int, float) for x in value):
        return tuple(map(float, value))
    if kind == tuple[str, ...] and isinstance(value, list) and all(type(item) is str for item in value):
        return tuple(value)
    raise ConfigError(f"{where}: {name} must be {EXPECTED[kind]}, got {_shown(value)}")


def is_text(value: Any) -> bool:
    """Whether `value` can be stored. A command line may contain bytes that are not UTF-8."""
    return not (isinstance(value, str) and re.search("[\ud800-\udfff]", value))


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _parse_override_value(raw: str, kind: Any) -> Any:
    """Parse the text after `=`: TOML, or for strings and lists what people type in a shell."""
    as_toml = toml_scalar(raw)
    if kind is str or (kind in (Window, Every) and as_toml is None):
        return as_toml if isinstance(as_toml, str) else raw
    if kind in EXPECTED_LISTS and not isinstance(as_toml, list):
        items = [item.strip() for item in raw.split(",")] if raw else []
        return items if kind == tuple[str, ...] else [toml_scalar(item, default=item) for item in items]
    return raw if as_toml is None else as_toml


def toml_scalar(raw: str, default: Any = None) -> Any:
    """Parse one TOML value; `default` if the text is none."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return default  # RecursionError or ValueError: thousands of brackets or digits
    return parsed["value"] if len(parsed) == 1 else default


def _shown(value: object) -> str:
    """A value, shortened, and its type in words."""
    words = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", list: "a list"}
    described = words.get(type(value), "a section" if isinstance(value, dict) else type(value).__name__)
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = "..."  # it holds a number too long to print
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({described})"
