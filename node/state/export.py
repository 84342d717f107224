"""Writes a snapshot as a Hugging Face folder, for transformers, vLLM and llama.cpp's converter. Torch-free.

    OUT/config.json  generation_config.json  README.md  tokenizer files
        model.safetensors, or model-00001-of-00002.safetensors ... and model.safetensors.index.json

It reads only the run directory, so it works while the run is on. The files are written to a temporary folder
and then renamed.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from node.config.schema import (
    DataSection,
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.data.chat import TOOL_TEMPLATE, load_chat_encoder, marker_template
from node.data.text import expanded, read_file
from node.data.tokenizer import (
    LLAMA_CLASSES,
    SENTENCEPIECE,
    BpeTokenizer,
    Tokenizer,
    json_object,
    load_tokenizer,
    of_tables,
    special_tokens,
)
from node.model.families.family import FileTensor
from node.model.units import EMBED, HEAD
from node.state.adapters import ADAPTER_WEIGHTS, adapter_config, adapter_tensors
from node.state.byte_tokenizer import BYTE_SETTINGS, byte_pieces, byte_tokenizer
from node.state.card import model_card
from node.state.families import tensors, write_config
from node.state.hub import INDEX, SINGLE
from node.state.manifest import Manifest
from node.state.object_store import bring, stored_steps
from node.state.snapshot import (
    held_by_nodes,
    is_complete,
    list_models,
    read_manifest,
    read_unit,
)
from node.state.start import (
    ADAPTER_CONFIG,
    CONFIG,
    OTHER_FILES,
    TOKENIZER,
    original_config,
    original_file,
    small_file,
)
from node.state.unit_state import file_head, parameters_of, read_tensors
from wire.errors import RunError, UserError

log = logging.getLogger(__name__)

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes of weights, with the bytes of an element."""
SHARD_BYTES = 4 << 30
"""The largest size of a safetensors file, unless a single tensor is larger."""
BYTES = "bytes"
SETTINGS = "tokenizer_config.json"
PATH_KEYS = frozenset(("name_or_path", "tokenizer_file", "special_tokens_map_file"))
"""Keys of `SETTINGS` with paths that transformers writes but does not read."""
GENERATION = "generation_config.json"
PARTIAL = ".partial"
"""The name, or the end of the name, of a folder that is being written."""
SNAPSHOT_TRIES = 5
"""How many snapshots to try, because a run may remove one while it is read."""

Arrays = Callable[[str], Mapping[str, np.ndarray]]
"""Returns a unit's weights by name, float32."""
Merge = Callable[[RunConfig, str, Mapping[str, np.ndarray]], dict[str, np.ndarray]]
"""Merges a unit's adapters into its whole weights."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the file, and the parameters of a unit that it contains."""

    unit: str
    parts: tuple[tuple[str, FileTensor], ...]

    @property
    def tensor(self) -> FileTensor:
        """The tensor's name and shape."""
        return self.parts[0][1]

    def array(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """The tensor's values, from the unit's parameters by name."""
        # Off-diagonal blocks of fused adapters stay zero.
        values = np.zeros(self.tensor.shape, dtype=np.float32)
        for parameter, tensor in self.parts:
            tensor.write(parameters[parameter], values)
        return values


def export(
    run_directory: Path, out: Path, *, step: int | None = None, dtype: str = "", merge: Merge | None = None
) -> int:
    """Write a snapshot of a run as a Hugging Face folder. Returns the snapshot's step.

    A run with adapters gives a folder in PEFT's format (`node.state.adapters`). If a running run removes
    the snapshot meanwhile and no `step` is given, a newer one is written.

    Args:
        merge: for a run with adapters, write the whole model that this returns (`node.state.merging`).
        step: the snapshot's step; by default the newest complete snapshot.
        dtype: one of `DTYPES`; by default as in the checkpoint that the run started from, else float32.

    Raises:
        UserError: there is no such snapshot, `out` is in use or cannot be written, or no family has this
            model.
        RunError: the snapshot is damaged, or was pruned meanwhile.
    """
    if out.exists() and (not out.is_dir() or any(path.name != PARTIAL for path in out.iterdir())):
        raise UserError(f"{out} is in use: name a new folder")
    tries_left = SNAPSHOT_TRIES
    while True:
        exported, directory = _snapshot(run_directory, step)
        tries_left -= 1
        try:
            _export(run_directory, directory, out, dtype, merge)
        except RunError:
            if not tries_left or step is not None or is_complete(directory):
                raise
        else:
            return exported


def _snapshot(run_directory: Path, step: int | None) -> tuple[int, Path]:
    """The step and the folder of a complete snapshot."""
    folders = list_models(run_directory)
    complete = sorted({*folders, *stored_steps(run_directory)})
    if not complete:
        hint = held_by_nodes(run_directory) or ": wait for run.snapshot_every steps"
        raise UserError(f"{run_directory} has no complete snapshot yet{hint}")
    step = complete[-1] if step is None else step
    if step not in complete:
        raise UserError(
            f"{run_directory} has no snapshot of step {step}; it has {', '.join(map(str, complete))}"
            f"{held_by_nodes(run_directory)}"
        )
    return step, folders.get(step) or bring(run_directory, step)


def _export(run_directory: Path, directory: Path, out: Path, dtype: str, merge: Merge | None) -> None:
    manifest = read_manifest(directory)
    config = _with_paths(_config(manifest), run_directory)
    model, adapters = config.model, config.lora.rank > 0
    if merge is not None and not adapters:
        raise UserError(
            "--merge is for runs with adapters ([lora]); this one trained the whole model: leave it out"
        )
    original = original_config(model)
    dtype = dtype or _dtype_of(original)
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    with _becoming(out) as partial:
        _write_tokenizer(config, partial)
        template = expanded(config.data.chat_template, "data.chat_template")
        if config.data.chat_template and template.is_file():
            (partial / "chat_template.jinja").write_bytes(read_file(template))
        elif config.data.chat_template:
            log.warning("%s is not on this machine: the exported folder has no chat template", template)
        elif config.data.response_marker:
            jinja = marker_template(config.data.response_marker, _begin(config.data.tokenizer))
            (partial / "chat_template.jinja").write_text(jinja, encoding="utf-8")
        if config.data.chat_template or config.data.response_marker:
            _remove_other_templates(partial)
        if adapters and merge is None:
            entries = list(_adapter_entries(config, manifest))
            _write_file(partial / ADAPTER_WEIGHTS, entries, dtype, lambda unit: _parameters(directory, unit))
            _write_json(partial / ADAPTER_CONFIG, adapter_config(config))
        else:

            def arrays(unit: str) -> dict[str, np.ndarray]:
                kept = _parameters(directory, unit)
                return kept if merge is None else merge(config, unit, kept)

            model = replace(model, tied=model.tied and _is_one_matrix(arrays))
            _write_weights(list(_entries(model, manifest)), dtype, arrays, partial)
            described = write_config(model, dtype, original)
            _write_json(partial / CONFIG, described)
            if not (partial / GENERATION).exists():
                tokens = {key: value for key, value in described.items() if key.endswith("_token_id")}
                _write_json(partial / GENERATION, tokens)
        _write_ends(config, partial / GENERATION)
        library = "peft" if adapters and merge is None else "transformers"
        card = model_card(run_directory, manifest, config, dtype, library)
        (partial / "README.md").write_text(card, encoding="utf-8")


@contextlib.contextmanager
def _becoming(out: Path) -> Iterator[Path]:
    """A folder, empty at first, that becomes `out` at the end. Raises UserError if it cannot."""
    is_there = out.is_dir()
    # A folder that is there may be a link, a mount or the working directory, which cannot be replaced.
    partial = out / PARTIAL if is_there else out.with_name(f".{out.name}{PARTIAL}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                for left in partial.iterdir():  # by a process that was killed
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield partial
                if is_there:
                    for file in partial.iterdir():
                        file.replace(out / file.name)
                else:
                    partial.replace(out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(lock)
    except BlockingIOError:
        raise UserError(
            f"another export to {out} is on its way: wait for it, or name another folder"
        ) from None
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; name another folder") from error


# ---- weights


def _write_weights(entries: Sequence[_Entry], dtype: str, arrays: Arrays, out: Path) -> None:
    shards = list(_shards(iter(entries), DTYPES[dtype]))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write_file(out / name, shard, dtype, arrays)
        weight_map |= {entry.tensor.name: name for entry in shard}
    if len(shards) > 1:
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_file(path: Path, entries: Sequence[_Entry], dtype: str, arrays: Arrays) -> int:
    """Write a safetensors file. Returns the bytes of its tensors."""
    layout = {entry.tensor.name: (dtype, tuple(entry.tensor.shape)) for entry in entries}
    head, _, size = file_head(layout, format="pt")
    with path.open("wb") as file:
        file.write(head)
        unit = ""
        parameters: Mapping[str, np.ndarray] = {}
        for entry in entries:
            if entry.unit != unit:
                unit, parameters = entry.unit, arrays(entry.unit)
            file.write(_encoded(entry.array(parameters), dtype))
        file.flush()
        os.fsync(file.fileno())
    return size


def _parameters(directory: Path, unit: str) -> dict[str, np.ndarray]:
    """A unit's weights in a snapshot."""
    return parameters_of(read_tensors(read_unit(directory, unit)))


def _is_one_matrix(arrays: Arrays) -> bool:
    """Whether a tied model's embedding and head are bitwise equal, so that one of them is enough."""
    names = ((EMBED, "tokens.weight"), (HEAD, "output.weight"))
    return len({sha256(np.ascontiguousarray(arrays(unit)[name]).data).digest() for unit, name in names}) == 1


def _adapter_entries(config: RunConfig, manifest: Manifest) -> Iterator[_Entry]:
    for unit in manifest.units:
        yield from _joined(unit.unit, adapter_tensors(config, unit.unit))


def _entries(model: ModelSection, manifest: Manifest) -> Iterator[_Entry]:
    for unit in manifest.units:
        by_parameter = tensors(model, unit.unit)
        # A tied head is the embedding, which the file contains once.
        if model.tied and unit.unit == HEAD:
            del by_parameter["output.weight"]
        yield from _joined(unit.unit, by_parameter)


def _joined(unit: str, by_parameter: Mapping[str, Sequence[FileTensor]]) -> Iterator[_Entry]:
    """The tensors of a file, each once, from the tensors of each parameter."""
    parts: dict[str, list[tuple[str, FileTensor]]] = {}
    for name, own in by_parameter.items():
        for tensor in own:
            parts.setdefault(tensor.name, []).append((name, tensor))
    for together in parts.values():
        yield _Entry(unit, tuple(together))


def _shards(entries: Iterator[_Entry], width: int) -> Iterator[list[_Entry]]:
    shard: list[_Entry] = []
    size = 0
    for entry in entries:
        length = width * prod(entry.tensor.shape)
        if shard and size + length > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += length
    yield shard


def _encoded(array: np.ndarray, dtype: str) -> bytes:
    """A float32 array as little-endian bytes of `dtype`, rounded to nearest even."""
    values = np.ascontiguousarray(array, dtype="<f4")
    if dtype == "float32":
        return values.tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.view("<u4")
    return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())


# ---- the other files


def _config(manifest: Manifest) -> RunConfig:
    """The run file in a manifest. Old snapshots lack the keys for adapters."""

    def fields(section: str, known: type | None = None) -> dict[str, Any]:
        given = manifest.config.get(section, {})
        return {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in given.items()
            # Sections that only the card uses may have keys that no longer exist.
            if known is None or key in {field.name for field in dataclasses.fields(known)}
        }

    return RunConfig(
        run=RunSection(**fields("run")),
        model=ModelSection(**fields("model")),
        lora=LoraSection(**fields("lora")),
        data=DataSection(**fields("data", DataSection)),
        training=TrainingSection(**fields("training", TrainingSection)),
        pipeline=PipelineSection(**fields("pipeline", PipelineSection)),
    )


def _with_paths(config: RunConfig, run_directory: Path) -> RunConfig:
    """`config` with the paths of the run file, because manifests that nodes see contain only names."""
    try:
        given = tomllib.loads((run_directory / "run.toml").read_text(encoding="utf-8"))
        paths = [given["model"]["from"], *(given["data"][key] for key in ("tokenizer", "chat_template"))]
    except (OSError, ValueError, KeyError, TypeError):
        return config
    names = (config.model.from_, config.data.tokenizer, config.data.chat_template)
    source, tokenizer, template = (
        path if isinstance(path, str) and Path(path).name == name else name
        for path, name in zip(paths, names, strict=True)
    )
    return replace(
        config,
        model=replace(config.model, from_=source),
        data=replace(config.data, tokenizer=tokenizer, chat_template=template),
    )


def _dtype_of(original: Mapping[str, Any] | None) -> str:
    given = (original or {}).get("torch_dtype") or (original or {}).get("dtype")
    return given if isinstance(given, str) and given in DTYPES else "float32"


def _write_tokenizer(config: RunConfig, out: Path) -> None:
    """Write the run's tokenizer as `tokenizer.json` with its other files.

    If it is not on this machine, use the tokenizer of the checkpoint that the run started from.
    """
    name, start = config.data.tokenizer, config.model.from_
    if name == BYTES:
        _write_json(out / TOKENIZER, byte_tokenizer())
        _write_json(out / SETTINGS, BYTE_SETTINGS)
        (out / SENTENCEPIECE).write_bytes(byte_pieces())
        return
    path = expanded(name, "data.tokenizer")
    folder = path.parent if path.is_file() else path
    if (tables := of_tables(name)) is not None:
        (out / TOKENIZER).write_text(tables.to_json(), encoding="utf-8")
        template = json_object(folder / SETTINGS).get("chat_template")
        named = {**special_tokens(folder), **({"chat_template": template} if template else {})}
        _write_json(out / SETTINGS, {**_settings(tables), **named})
        if (jinja := small_file(folder / "chat_template.jinja")) is not None:
            (out / "chat_template.jinja").write_bytes(jinja)
        return
    table = small_file(path if path.is_file() else folder / TOKENIZER)
    # Another tokenizer's settings and templates do not belong to it.
    is_original = table in (None, original_file(start, TOKENIZER))
    for file in (TOKENIZER, *OTHER_FILES):
        data = table if file == TOKENIZER else small_file(folder / file)
        if data is None and (is_original or file == GENERATION):
            data = original_file(start, file)
        if data is not None:
            (out / file).parent.mkdir(exist_ok=True)
            (out / file).write_bytes(_written_settings(data) if file == SETTINGS else data)
    if (pieces := _sentencepiece(path, start)) is not None:
        (out / SENTENCEPIECE).write_bytes(pieces)
    if not (out / TOKENIZER).exists():
        log.warning("the tokenizer %s is not on this machine: the exported folder has no tokenizer", name)
    elif not (out / SETTINGS).exists():
        _write_json(out / SETTINGS, _settings(load_tokenizer(str(out))))


def _begin(tokenizer: str) -> str:
    """What this tokenizer puts before a text; empty if it is not on this machine."""
    try:
        tables = load_tokenizer(tokenizer)
    except UserError:
        return ""
    return tables.decode(np.array(tables.begin)) if tables.begin else ""


def _settings(tokenizer: Tokenizer) -> dict[str, str]:
    """Settings by which transformers takes `tokenizer.json` as it is. Without a class it takes that of the
    model's type, which may have other rules."""
    end = tokenizer.end_of_text if isinstance(tokenizer, BpeTokenizer) else ""
    return {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": end} if end else {})}


def _sentencepiece(path: Path, start: str) -> bytes | None:
    """The model of SentencePiece that belongs to the run's `tokenizer.json`, for llama.cpp's converter."""
    if not path.exists():
        return original_file(start, SENTENCEPIECE)
    own = path / TOKENIZER if path.is_dir() else path
    return small_file(own.with_name(SENTENCEPIECE)) if own.name == TOKENIZER else None


def _remove_other_templates(out: Path) -> None:
    """Remove the templates of the base's tokenizer, because the run had one of its own for all conversations.
    Some programs read them first."""
    shutil.rmtree((out / TOOL_TEMPLATE).parent, ignore_errors=True)
    settings = json_object(out / SETTINGS)
    if settings.pop("chat_template", None) is not None:
        _write_json(out / SETTINGS, settings)


def _object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; empty if it is not one."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _written_settings(data: bytes) -> bytes:
    """The settings of a tokenizer without the paths of the machine that saved it, and with the names that
    transformers 5 has changed as all versions read them."""
    values = _object(data)
    kept = {key: value for key, value in values.items() if key not in PATH_KEYS}
    # With Llama's classes transformers 5 would not take `tokenizer.json` as it is.
    llama = LLAMA_CLASSES if kept.get("eos_token") else ()
    if kept.get("tokenizer_class") in ("TokenizersBackend", *llama):
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(kept.get("extra_special_tokens"), list):
        kept["additional_special_tokens"] = kept.pop("extra_special_tokens")
    return data if kept == values else (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()


def _write_ends(config: RunConfig, path: Path) -> None:
    """Complete the ids that end a text: add the tokenizer's if there are none, and after a run on
    conversations put the token that ends an answer first. Without the file or the tokenizer, do nothing."""
    if not path.exists():
        return
    given = json_object(path)
    known = given.get("eos_token_id")
    listed = known if isinstance(known, list) else [known]
    ends = list(dict.fromkeys(end for end in listed if type(end) is int and end >= 0))
    data = config.data
    try:
        if not ends:
            ends = sorted(load_tokenizer(data.tokenizer).ends)
        if data.format == "chat":
            turn_ends = load_chat_encoder(str(path.parent), "").turn_ends
            ends = [*turn_ends, *(end for end in ends if end not in turn_ends)]
    except UserError:
        return
    _write_json(path, {**given, "eos_token_id": ends[0] if len(ends) == 1 else ends or None})


def _write_json(path: Path, values: Mapping[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
