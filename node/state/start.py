"""Starts a run from a checkpoint: fills `[model]` from `config.json`, reads weights. Torch-free."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from node.config.schema import ModelSection, RunConfig
from node.data.chat import TOOL_TEMPLATE, chat_encoder
from node.data.text import expanded, read_small
from node.data.tokenizer import MOST_TABLES_BYTES, SENTENCEPIECE, load_tokenizer, tokenizer_files
from node.model.units import unit_names
from node.state.families import read_config
from node.state.hub import (
    INDEX,
    NOT_GGUF,
    PREFIX,
    SINGLE,
    HubUnreachableError,
    Repository,
    cached_file,
    download,
    hub_files,
    resolve,
)
from node.state.unit_state import weights_file
from node.state.weights import Checkpoint, CheckpointError, FolderFiles, Weights
from wire.errors import ConfigError, DataError, shortened

log = logging.getLogger(__name__)

CONFIG = "config.json"
GGUF = ".gguf"
TOKENIZER = "tokenizer.json"
OTHER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    TOOL_TEMPLATE,
    "generation_config.json",
)
"""Small files that an export copies."""
ADAPTER_CONFIG = "adapter_config.json"
MOST_CONFIG_BYTES = 4 << 20
OTHER_TABLES = ("vocab.json", "merges.txt")
"""The files of a tokenizer that has neither `TOKENIZER` nor `SENTENCEPIECE`."""
PADDING = 1024
"""A model's vocabulary and its tokenizer's differ by fewer tokens than this."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The checkpoint that a run file's `model.from` names."""

    name: str
    """The value of `model.from`, with a hub's revision pinned to a commit."""
    model: dict[str, Any]
    """The keys of `[model]`."""
    tokenizer: str
    """The folder of the tokenizer; empty if the checkpoint has none."""


def open_source(name: str, given: Mapping[str, Any]) -> Source:
    """Inspect a checkpoint.

    Args:
        name: the value of `model.from`. given: the keys of `[model]` in the run file. Except for `sequence`
            they must agree with the checkpoint.

    Raises ConfigError or DataError with one line.
    """
    if name.startswith(PREFIX):
        repository = resolve(Repository.parse(name))
        name = str(repository)
        path = _download(repository)
    else:
        path = _folder(name) / CONFIG
        _refuse_gguf(path.parent)
    if (path.parent / ADAPTER_CONFIG).exists():
        raise ConfigError(
            f"{name} contains adapters ({ADAPTER_CONFIG}), which transformers loads onto another model: "
            "merge them and save the whole model (merge_and_unload), or remove that file"
        )
    if all((path.parent / file).exists() for file in (SINGLE, INDEX)):
        log.warning("%s has both %s and %s: the first is read, as transformers does", name, SINGLE, INDEX)
    keys = read_config(_read_json(path), str(path), given.get("sequence"))
    if keys["tied"] and _heads_differ(ModelSection(**keys, from_=name)):
        log.warning(
            "%s: tie_word_embeddings is true, but the head in the file differs from the embedding: it is "
            "trained as a separate head, as transformers loads it",
            path,
        )
        keys["tied"] = False
    for key, value in given.items():
        if key in keys and key != "sequence" and value != keys[key]:
            raise ConfigError(
                f"model.{key} is {value!r}, but {path} says {keys[key]!r}: leave it out of the run file"
            )
    return Source(name=name, model=keys, tokenizer=_tokenizer(path.parent, keys["vocab"]))


def _download(repository: Repository) -> Path:
    """Download the small files of a repository. Returns the path of one of them.

    Once the hub does not answer, only the cache is read, and a warning names the files that it lacks.

    Raises:
        DataError: there is neither `CONFIG` nor `ADAPTER_CONFIG`.
    """
    paths: dict[str, Path] = {}
    lacking: list[str] = []
    failure: HubUnreachableError | None = None
    for name in (ADAPTER_CONFIG, CONFIG, TOKENIZER, SENTENCEPIECE, *OTHER_FILES, *OTHER_TABLES):
        if (name == CONFIG and paths) or (name in OTHER_TABLES and TOKENIZER in paths):
            continue
        try:
            if (path := download(repository, name, required=name == CONFIG)) is not None:
                paths[name] = path
        except HubUnreachableError as error:
            failure = failure or error
            if name == CONFIG:
                raise failure from None
            repository = replace(repository, cached=True)
            lacking.append(name)
    if failure is not None:
        log.warning(
            "%s; these files are not in the cache and count as absent: %s", failure, ", ".join(lacking)
        )
    return next(iter(paths.values()))


def _refuse_gguf(path: Path) -> None:
    """Raise ConfigError if the path is a GGUF file, or a folder whose only weights are in such files."""
    files = [path] if path.suffix == GGUF else sorted(path.glob(f"*{GGUF}"))
    if files and not any(path.glob("*.safetensors")):
        raise ConfigError(f"{files[0]} is a GGUF file, which cannot be trained: {NOT_GGUF}")


def _tokenizer(folder: Path, vocab: int) -> str:
    """The folder if it has a tokenizer, else "". Raises DataError if the tokenizer does not fit the model."""
    try:
        files = tokenizer_files(folder)
    except DataError:
        return ""
    if files[0].name == SENTENCEPIECE and abs(vocab - load_tokenizer(str(folder)).vocabulary) >= PADDING:
        raise DataError(
            f"{files[0]} has {load_tokenizer(str(folder)).vocabulary} tokens, but the model has {vocab}: add "
            f"the model's {TOKENIZER}, or name the model's tokenizer in data.tokenizer"
        )
    return str(folder)


def _heads_differ(model: ModelSection) -> bool:
    """Whether a tied model's file has a head that differs from its embedding."""

    async def differ() -> bool:
        async with _opened(model) as checkpoint:
            return await checkpoint.heads_differ(model)

    try:
        return asyncio.run(differ())
    except DataError:
        return False  # `check_weights` reports the problem before a run starts


def original_file(name: str, file: str) -> bytes | None:
    """A small file of the checkpoint that a run started from, if it is on this machine. Raises DataError."""
    if not name:
        return None
    path = cached_file(Repository.parse(name), file) if name.startswith(PREFIX) else _folder(name) / file
    return None if path is None else small_file(path)


def original_config(model: ModelSection) -> dict[str, Any] | None:
    """The `config.json` of the checkpoint that a run started from. None if it is not on this machine, or if
    it describes another model now; then a warning is logged. Raises DataError if it cannot be read."""
    if (content := original_file(model.from_, CONFIG)) is None:
        return None
    try:
        values: dict[str, Any] = json.loads(content)
        keys = read_config(values, CONFIG, model.sequence)
    except (ValueError, AttributeError, RecursionError, ConfigError) as error:
        changed = shortened(str(error), 300)
    else:
        # A head of its own makes a tied model untied.
        keys["tied"] = keys["tied"] and model.tied
        changed = ", ".join(key for key, value in keys.items() if getattr(model, key) != value)
    if not changed:
        return values
    log.warning(
        "%s in %s is not the one with which the run began (%s): the run keeps its own values",
        CONFIG,
        model.from_,
        changed,
    )
    return None


def small_file(path: Path) -> bytes | None:
    """A file of a model or its tokenizer; None if it does not exist. Raises DataError."""
    try:
        return read_small(path, MOST_TABLES_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


async def read_units(
    model: ModelSection, units: Sequence[str], *, token: bool = True, as_stored: bool = False
) -> Weights:
    """The weights of these units from `model.from_`. Raises DataError with one line.

    Args:
        token: whether to send the token of this machine's user to the hub.
        as_stored: as in `Checkpoint.read`.
    """
    async with _opened(model, token) as checkpoint:
        return await checkpoint.read(model, units, as_stored=as_stored)


def first_weights(model: ModelSection, unit: str, known: Mapping[str, str]) -> dict[str, np.ndarray]:
    """A unit's weights from `model.from_` in float32, after `check_first`. Raises DataError."""
    weights = asyncio.run(read_units(model, [unit]))[unit]
    if unit in known:
        check_first(model, unit, sha256(weights_file(weights)).hexdigest(), known)
    return weights


def check_first(model: ModelSection, unit: str, digest: str, known: Mapping[str, str]) -> None:
    """Refuse weights other than those with which a run began.

    Args:
        digest: the SHA-256 of the unit's `weights_file`.
        known: the digests of units on record.

    Raises:
        CheckpointError: the weights have changed.
    """
    if known.get(unit, digest) != digest:
        raise CheckpointError(
            f"the weights of {unit} in {model.from_} are not those with which the run began: restore that "
            "checkpoint, or start a new run from it as it is now"
        )


def frozen_ends(config: RunConfig) -> frozenset[int]:
    """The tokens that end answers, if a run on conversations trains adapters alone. Raises DataError."""
    if not config.lora.rank or config.data.format != "chat":
        return frozenset()
    return chat_encoder(config.data).turn_ends


async def check_weights(model: ModelSection, ends: Iterable[int] = ()) -> None:
    """Check by headers alone that `model.from_` has every tensor of the model, with its shape and complete.

    Logs tensors that the model does not need, and the tokens of `frozen_ends` that it does not know. Raises
    DataError with one line.
    """
    async with _opened(model) as checkpoint:
        if left := await checkpoint.check(model, unit_names(model)):
            log.warning(
                "%s has %d tensors that do not belong to the model in its %s and are ignored: %s",
                model.from_,
                len(left),
                CONFIG,
                ", ".join(left[:3]) + (", ..." if len(left) > 3 else ""),
            )
        for token in await checkpoint.untrained(model, ends):
            log.warning(
                "%s was never trained on token %d, which ends answers, and adapters do not train its row: "
                "the model would not learn to stop. Start from a chat model, set data.chat_template to one "
                "with tokens that the model knows, or train the whole model (lora.rank = 0)",
                model.from_,
                token,
            )


@asynccontextmanager
async def _opened(model: ModelSection, token: bool = True) -> AsyncIterator[Checkpoint]:
    if not model.from_.startswith(PREFIX):
        yield Checkpoint(FolderFiles(_folder(model.from_)))
        return
    async with hub_files(Repository.parse(model.from_, token=token)) as files:
        yield Checkpoint(files)


def _folder(name: str) -> Path:
    return expanded(name, "model.from")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_small(path, MOST_CONFIG_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"no {CONFIG} in {path.parent}: model.from needs a Hugging Face model folder, or "
            "hf://OWNER/NAME for a model of the hub"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): copy it again") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} must be a JSON object")
    return values
