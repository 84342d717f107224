"""Parts of a data set that are not to be mixed: splits (train, test) and configurations (subsets)."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from node.data.text import (
    COMPRESSED,
    JSON_SUFFIXES,
    TABLES,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    content_suffix,
    read_ends,
    read_file,
    suffix_of,
    unreadable,
)
from wire.errors import DataError

logger = logging.getLogger(__name__)

SPLITS = frozenset(
    (
        *("train", "training", "validation", "valid", "val", "dev"),
        *("eval", "evaluation", "test", "testing", "holdout", "hold-out", "heldout", "held-out"),
    )
)
DATA_CARD = "readme.md"
"""The page that describes the rows beside it, and may name their parts."""
_SPLIT_WORD = re.compile(f"(?<![a-z])({'|'.join(sorted(SPLITS, reverse=True))})(?![a-z])")
_ROWS = frozenset((*TABLES, *JSON_SUFFIXES))
_TEXTS = frozenset((".txt", ".csv"))
_SUFFIXES = _ROWS | _TEXTS | TOKEN_SUFFIXES
"""Suffixes of files whose names may say which part of a data set they hold."""
_SHARDS = re.compile(r"/.*|-[0-9]{5}-of-.*")
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})")
"""The name of one of several files of a split on the Hugging Face hub."""
_FRONT = re.compile(r"---[ \t]*\n(.*?\n)---[ \t]*\n", re.DOTALL)
_CONFIGURATIONS = re.compile(r"^configs:[ \t]*\n((?:[ \t-].*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"\s*(?:- +)*(?:[\"']?(config_name|split|path|data_files|data_dir)[\"']?:)?\s*(.*?)\s*")
_FLOW = re.compile(r"\{(\s*[\"']?\w+[\"']?\s*:[^{}]*)\}")
_NEXT_KEY = re.compile(r",(?=\s*[\"']?\w+[\"']?\s*:)")
"""An object within a line of YAML, and what stands before each of its other keys."""


def check_parts(folder: Path, every: Sequence[Path], data: Sequence[Path]) -> None:
    """Refuse several splits or configurations of a data set in one folder. Warn if some of its files are
    missing, empty, or copies of others.

    The data card, `dataset_dict.json`, `dataset_info.json`, or names that differ in nothing else tell them.

    Args:
        every: all files of the folder.
        data: the files among them that would be read.

    Raises:
        DataError: there are several.
    """
    splits: dict[str, set[str]] = {}
    configurations: dict[str, set[str]] = {}
    for path in every:
        if path.parent == folder and path.name.lower() == DATA_CARD:
            _check_card(folder, path, data)
        elif path.name == "dataset_dict.json":
            splits.setdefault(f"{path.parent}/", set()).update(
                map(str, settings_of(path).get("splits") or ())
            )
        elif path.name == "dataset_info.json" and (name := (info := settings_of(path)).get("config_name")):
            configurations.setdefault(str(info.get("dataset_name")), set()).add(str(name))
    shards: Counter[tuple[Path, str, int]] = Counter()
    subsets: dict[str, str] = {}
    unpacked: set[Path] = set()
    for path in data:
        plain = path.with_suffix("") if suffix_of(path) in COMPRESSED else path
        if plain in unpacked:
            raise DataError(f"folder {folder} holds {plain.name} twice, compressed and not: take one out")
        unpacked.add(plain)
        if (suffix := content_suffix(path)) not in _SUFFIXES:
            continue
        # Folders of text often belong to a program.
        base = path.parent if suffix in _TEXTS else folder
        whole = str(path.relative_to(base))
        name = whole.lower()[: whole.lower().rindex(suffix)]
        split = _SHARD.fullmatch(Path(name).name)
        if split:
            shards[path.parent, split[1], int(split[2])] += 1
        if split and (path.parent.name == "data" or _SPLIT_WORD.search(split[1].replace("_", " "))):
            splits.setdefault(f"{path.parent}/*-00000-of-00000", set()).add(split[1])
        for word in _SPLIT_WORD.finditer(name):
            sharded = _SHARDS.match(name, word.end())
            after = "" if sharded else _SHARDS.sub("", name[word.end() :])
            place = f"{base}/{name[: word.start()]}*{re.sub('[0-9]+', '0', after)}"
            splits.setdefault(place, set()).add(word[1])
            if suffix in _ROWS and not after:
                # The hub keeps each configuration in a folder. Folders that differ in a number may be shards.
                subset = whole[: word.start()].rpartition("/")[0]
                subsets.setdefault(subset if sharded else re.sub("[0-9]+", "0", subset), subset or ".")
    for place, words in splits.items():
        _check_one(folder, "splits", words, f" in {place}")
    for several in (*configurations.values(), subsets.values()):
        _check_one(folder, "configurations", several)
    for (beside, stem, total), count in shards.items():
        if count < total:
            logger.warning(
                "%s holds %d of the %d files of %s: the others are missing", beside, count, total, stem
            )
    _report_contents(folder, data)


def _report_contents(folder: Path, data: Sequence[Path]) -> None:
    """Warn if files of rows or tokens are empty, if files have the same content, by their sizes and ends, or
    perhaps the same rows, by their names, and if text may belong to the data set's page or to its other
    splits."""
    named: dict[str, Path] = {}
    for path in data:
        if (suffix := content_suffix(path)) in _ROWS:
            other = named.setdefault(str(path.relative_to(folder)).lower().rpartition(suffix)[0], path)
            if other is not path:
                logger.warning(
                    "%s and %s are both read: take one out if they hold the same rows", other, path
                )
    texts = [path.relative_to(folder) for path in data if content_suffix(path) in TEXT_SUFFIXES]
    if named and texts:
        logger.warning(
            "%d of the %d files in %s are text beside files of rows, such as %s: they are trained on too; "
            "name the files of rows, or a folder with them alone, if they should not be",
            len(texts),
            len(data),
            folder,
            texts[0],
        )
    folders = {part for path in texts for part in path.parts[:-1] if part.lower() in SPLITS}
    if len(folders) > 1 and not {"train", "training"}.isdisjoint(map(str.lower, folders)):
        logger.warning(
            "%s has text in folders named %s, and all of it is trained on: set [data] path, sources or valid "
            "to those that you mean",
            folder,
            ", ".join(sorted(folders)),
        )
    copies: list[tuple[Path, Path]] = []
    first: dict[tuple[int, bytes], Path] = {}
    try:
        sizes = {path: path.stat().st_size for path in data}
        several = Counter(sizes.values())
        for path, size in sizes.items():
            if size and several[size] > 1:
                original = first.setdefault((size, sha256(read_ends(path, size)).digest()), path)
                copies += [(path, original)] if original is not path else []
    except OSError as error:
        raise unreadable(folder, error) from error
    empty = [path for path, size in sizes.items() if not size and content_suffix(path) not in TEXT_SUFFIXES]
    if empty:
        logger.warning(
            "%d of the %d files in %s are empty, such as %s: copy them again if they should not be",
            len(empty),
            len(data),
            folder,
            empty[0].relative_to(folder),
        )
    if copies:
        logger.warning(
            "%d of the %d files in %s are copies of others, such as %s of %s: their text is read twice",
            len(copies),
            len(data),
            folder,
            *(path.relative_to(folder) for path in copies[0]),
        )


def _check_one(folder: Path, kind: str, names: Iterable[str], where: str = "") -> None:
    if len(listed := sorted(set(names))) > 1:
        raise DataError(
            f"folder {folder} holds several {kind} ({', '.join(listed)[:200]}{where}): set [data] path, "
            "sources or valid to the folder or files of each that you mean"
        )


def _check_card(folder: Path, card: Path, data: Sequence[Path]) -> None:
    """Compare the files with the parts that a data card's `configs` list, as the hub reads them."""
    names = [str(path.relative_to(folder)) for path in data]
    by_part: dict[tuple[str, str], set[str]] = {}
    for configuration, split, pattern in _listed_parts(card):
        # A star of `fnmatch` matches folders too.
        matching = pattern.replace("**/", "*")
        files = {name for name in names if fnmatchcase(name, matching) or name.startswith(f"{pattern}/")}
        by_part.setdefault((configuration, split), set()).update(files)
    there = {part: frozenset(files) for part, files in by_part.items() if files}
    for at, kind in enumerate(("configurations", "splits")):
        parts: dict[str, set[str]] = {}
        for part, listed in there.items():
            parts.setdefault(part[at], set()).update(listed)
        if len(set(map(frozenset, parts.values()))) > 1:
            _check_one(folder, kind, parts, f" in {card.name}")


def _listed_parts(card: Path) -> Iterator[tuple[str, str, str]]:
    """The configuration, the split and the pattern of each entry in a data card's front matter (YAML)."""
    try:
        front = _FRONT.match(read_file(card).decode(errors="replace").replace("\r\n", "\n"))
    except OSError as error:
        raise unreadable(card, error) from error
    listed = _CONFIGURATIONS.search(front[1]) if front else None
    configuration = split = ""
    text = _FLOW.sub(lambda flow: "\n" + _NEXT_KEY.sub("\n", flow[1]) + "\n", listed[1] if listed else "")
    for line in text.splitlines():
        if (entry := _ENTRY.fullmatch(line)) is None or entry[2].startswith("#"):
            continue
        values = [value.strip(" \"'") for value in entry[2].strip("[]").split(",") if value.strip(" \"'")]
        if entry[1] == "config_name":
            configuration, split = "".join(values), ""
        elif entry[1] == "split":
            split = "".join(values)
        elif entry[1] or ":" not in entry[2]:
            yield from ((configuration, split, value.removeprefix("./").rstrip("/")) for value in values)


def settings_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file of settings; empty if it holds another value. Raises DataError."""
    try:
        settings = json.loads(read_file(path))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): copy it again") from error
    return settings if isinstance(settings, dict) else {}
