"""Training data of any size, tokenized in shards during training, in an order that follows from a seed.

Sources are listed (`documents.py`), and their shards are permuted for each pass. A shard is tokenized into
parts of about `PART_TOKENS` tokens: whole documents, each followed by an end of text. `GROUP_PARTS` parts in
a row form a group, whose windows are permuted. So sample n of a source is known once the groups before it are
tokenized (the first after seconds), and is the same whenever it is requested. Parts stay on disk:

    FOLDER/SHARD.PART.tokens   ids, little endian
                      .mask    a byte per token: `COUNTS` for the assistant's, `BEGINS` for the first of a
                               conversation; only for chat
                      .json    counts and SHA-256; written last

Several sources are mixed by weights. The source of each sample is drawn in blocks of `MIX_BLOCK` samples.
"""

import json
import logging
import os
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations, islice
from pathlib import Path

import numpy as np

from node.config.schema import DataSection, RunConfig
from node.data.chat import ChatEncoder, chat_encoder
from node.data.conversations import Dropped
from node.data.data import Corpus, check_tokens, check_vocabulary, document_starts, end_of_text, known
from node.data.documents import (
    LARGE_BYTES,
    Batch,
    Extent,
    Shard,
    Source,
    batches,
    check_unchanged,
    list_source,
    needs_shards,
    nothing_left,
    read_rows,
    text_of,
)
from node.data.order import Mixture
from node.data.text import SEPARATOR, STDLIB, check_kind, expanded, listed, read_ends, suffix_of
from node.data.token_cache import BATCH_PIECES, cache_folder, replace_json, sole_writer
from node.data.tokenizer import Tokenizer, load_tokenizer, pieces_of
from node.model.labels import IGNORED
from node.model.rng import generator
from wire.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

COUNTS, BEGINS = 1, 2
"""The bits of a mask: the token counts as a label; the token begins a document."""
FORMAT = "8"
"""Increase this when files are read, cut or rendered in another way."""
_LLM_C = (20240520, 20240801)
"""The first numbers of token files of llm.c, for GPT-2 and for Llama 3."""
_LITGPT = b"LITPKDS"
"""The beginning of token files of litgpt."""
_NUMPY = b"\x93NUMPY"
"""The beginning of a .npy file."""
_FEW_IDS = 16
"""In a file of so few ids, every second one may be zero."""
PART_TOKENS = 1 << 20
"""The approximate number of tokens in a part."""
GROUP_PARTS = 4
"""The number of parts in a group."""
GROUPS_AHEAD = 4
"""The number of groups that are tokenized beyond those that training has used."""
OPEN_PARTS = 64
"""The most parts that are kept mapped."""
LONG_SHARE = 10
"""If more than one conversation in this many is longer than a sample, this is reported."""
MOST_PARTS = 16
"""The most parts of a shard that are tokenized to estimate its size."""
CLOSE_SECONDS = 2.0
"""How long `close` waits for the thread that tokenizes ahead. An unfinished part is tokenized again later."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """Tokens of a part of a shard, mapped from disk."""

    tokens: np.ndarray
    """Token ids [n], unsigned."""
    mask: np.ndarray | None
    """[n] of `COUNTS` and `BEGINS`; None if all tokens count and documents end with a token."""


@dataclass(frozen=True)
class Counts:
    tokens: int
    documents: int
    """The documents that were read, including dropped ones."""
    labels: int
    """The tokens that count as labels."""
    dropped: dict[str, int]
    """The number of documents left out, by reason."""
    last: bool
    """Whether this is the shard's last part."""


class TokenizedSource:
    """A listed source as parts of tokens, which are made when they are first requested.

    Only one thread at a time may call `counts`; `part` may be called from any thread.
    """

    def __init__(
        self,
        source: Source,
        data: DataSection,
        tokenizer: Tokenizer,
        chat: ChatEncoder | None,
        vocab: int,
        folder: Path,
    ) -> None:
        self.source = source
        self._data = data
        self._tokenizer = tokenizer
        self._chat = chat
        self._vocab = vocab
        parts = [
            source.digest,
            tokenizer.fingerprint,
            data.jsonl_field,
            f"{chat.fingerprint} 2" if chat else "",
        ]
        self.key = sha256("\0".join(parts).encode()).hexdigest()
        """A digest of everything in the run file that determines the tokens. It is the same with every
        version."""
        given = [FORMAT, self.key, source.stamps, str(source.skips), data.format, chat.format if chat else ""]
        self._folder = folder / sha256(repr(given).encode()).hexdigest()
        self._open: OrderedDict[tuple[int, int], Part] = OrderedDict()
        self._lock = threading.Lock()
        self._making: tuple[int, int, Iterator[tuple[list[np.ndarray], list[np.ndarray], Counts]]] | None = (
            None
        )

    def counts(self, shard: int, part: int) -> Counts | None:
        """The counts of a part, which is tokenized now if necessary; None if the shard has no such part."""
        if self.source.is_tokens:
            return Counts(len(self.part(shard, 0).tokens), 1, 0, {}, True) if part == 0 else None
        if part and (before := self._counts_on_disk(shard, part - 1)) is not None and before.last:
            return None
        counts = self._counts_on_disk(shard, part)
        if counts is None:
            try:
                with sole_writer(self._folder, "parts"):
                    counts = self._counts_on_disk(shard, part) or self._make(shard, part)
            except OSError as error:
                raise DataError(
                    f"tokens cannot be kept in {self._folder} ({error.strerror}): free some space or set "
                    "XDG_CACHE_HOME to a folder that can be written"
                ) from error
        return counts

    def part(self, shard: int, part: int) -> Part:
        """The tokens of a part that has been made.

        Raises:
            DataError: its file was changed.
        """
        key = shard, part
        if self.source.is_tokens and len(self.source.shards[shard].extents) == 1:  # mapped, not copied
            check_unchanged(self.source, self.source.shards[shard])
        with self._lock:
            mapped = self._open.get(key)
            if mapped is None:
                tokens = self.source.is_tokens
                mapped = self._token_arrays(self.source.shards[shard]) if tokens else self._map(shard, part)
                self._open[key] = mapped
            self._open.move_to_end(key)
            while len(self._open) > OPEN_PARTS:
                self._open.popitem(last=False)
        return mapped

    def _name(self, shard: int, part: int, kind: str) -> Path:
        return self._folder / f"{shard:06}.{part:04}.{kind}"

    def _counts_on_disk(self, shard: int, part: int) -> Counts | None:
        try:
            raw = json.loads(self._name(shard, part, "json").read_bytes())
            return Counts(**{name: raw[name] for name in Counts.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _map(self, shard: int, part: int) -> Part:
        record = json.loads(self._name(shard, part, "json").read_bytes())
        path = self._name(shard, part, "tokens")
        dtype = self._tokenizer.dtype.newbyteorder("<")
        count = record["tokens"]
        if count == 0:
            return Part(np.zeros(0, dtype), None)
        digest = sha256()
        try:
            tokens = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
            digest.update(tokens.data)
            mask = None
            if self._chat is not None:
                mask = np.memmap(self._name(shard, part, "mask"), dtype=np.uint8, mode="r", shape=(count,))
                digest.update(mask.data)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}): delete {self._folder}") from error
        if digest.hexdigest() != record["sha256"]:
            raise DataError(f"{path} is damaged: delete {self._folder}")
        # The part may come from a run with a larger model.
        self._check(tokens, str(self.source.path))
        return Part(tokens, mask)

    def _make(self, shard: int, part: int) -> Counts:
        """Tokenize a part of a shard. Parts must be made in order."""
        # A failed generator cannot continue. The next call starts again and fails with the same error.
        making, self._making = self._making, None
        if making is None or making[:2] != (shard, part):
            skipped = 0
            for before in range(part):
                known = self._counts_on_disk(shard, before)
                if known is None:
                    raise DataError(f"tokens in {self._folder} were deleted: start the coordinator again")
                skipped += known.documents
            making = shard, part, self._tokenize(self.source.shards[shard], skipped)
        ids, masks, counts = next(making[2])
        digest = sha256()
        dtype = self._tokenizer.dtype.newbyteorder("<")
        for kind, arrays in (("tokens", ids), *((("mask", masks),) if self._chat is not None else ())):
            with self._name(shard, part, kind).open("wb") as file:
                for array in arrays:
                    written = array.astype(dtype if kind == "tokens" else np.uint8, copy=False).tobytes()
                    digest.update(written)
                    file.write(written)
                file.flush()
                os.fsync(file.fileno())
        values = {**vars(counts), "sha256": digest.hexdigest()}
        replace_json(self._name(shard, part, "json"), values)
        if not counts.last:
            self._making = shard, part + 1, making[2]
        return counts

    def _tokenize(
        self, shard: Shard, skipped: int
    ) -> Iterator[tuple[list[np.ndarray], list[np.ndarray], Counts]]:
        """The shard's parts. The first `skipped` documents were in earlier parts."""
        ids: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        dropped: Counter[str] = Counter()
        tokens = documents = labels = 0
        check_unchanged(self.source, shard)
        rows = islice(read_rows(shard, self._data, skips=self.source.skips), skipped, None)
        for batch in batches(rows):
            if tokens >= PART_TOKENS:
                yield ids, masks, Counts(tokens, documents, labels, dict(dropped), last=False)
                ids, masks, dropped = [], [], Counter()
                tokens = documents = labels = 0
            documents += len(batch)
            for encoded, mask, reason in self._encode(batch):
                if reason:
                    dropped[reason] += 1
                    continue
                ids.append(encoded)
                tokens += len(encoded)
                if mask is not None:
                    masks.append(mask)
                    labels += int(np.count_nonzero(mask & COUNTS))
        yield ids, masks, Counts(tokens, documents, labels, dict(dropped), last=True)

    def _encode(self, batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray | None, str]]:
        """The ids, mask and reason for dropping of each document. Each document ends with an end of text."""
        (end,) = self._tokenizer.encode([SEPARATOR])
        if self._chat is not None:
            for (place, _), tokens in zip(batch, self._chat.encode_all(batch), strict=True):
                if isinstance(tokens, Dropped):
                    yield end, None, str(tokens)
                    continue
                ids, mask = tokens
                self._check(ids, place)
                bits = np.concatenate([mask, np.zeros(len(end), bool)]).astype(np.uint8) * COUNTS
                bits[0] |= BEGINS
                yield np.concatenate([ids, end]), bits, ""
            return
        begin = np.array(self._tokenizer.begin, dtype=self._tokenizer.dtype)
        cut: list[list[bytes] | str] = []
        for place, row in batch:
            try:
                cut.append(list(pieces_of(text_of(row, place, self._data))))
            except Dropped as reason:
                cut.append(str(reason))
        pieces = [piece for document in cut if isinstance(document, list) for piece in document]
        # In pieces, because before packing the tokens of a long document take many times its size.
        encoded = (
            piece
            for at in range(0, len(pieces), BATCH_PIECES)
            for piece in self._tokenizer.encode(pieces[at : at + BATCH_PIECES])
        )
        for (place, _), document in zip(batch, cut, strict=True):
            if isinstance(document, list):
                ids = np.concatenate([begin, *islice(encoded, len(document)), end])
                self._check(ids, place)
                yield ids, None, ""
            else:
                yield end, None, document

    def _token_arrays(self, shard: Shard) -> Part:
        arrays = [self._token_array(extent) for extent in shard.extents]
        return Part(
            arrays[0] if len(arrays) == 1 else np.concatenate([ids.astype(np.uint32) for ids in arrays]), None
        )

    def _token_array(self, extent: Extent) -> np.ndarray:
        try:
            with extent.path.open("rb") as file:
                head = file.read(256)
            if suffix_of(extent.path) == ".npy" and head.startswith(_NUMPY):
                whole = np.load(extent.path, mmap_mode="r", allow_pickle=False)
                if (rest := extent.path.stat().st_size - whole.offset - whole.nbytes) > 0:
                    raise DataError(
                        f"{extent.path} has {rest:,} bytes behind its array: write each array to its own file"
                    )
            else:
                check_kind(extent.path, head)
                if suffix_of(extent.path) == ".npy":
                    raise DataError(
                        f"{extent.path} has no header of NumPy: if it has ids alone, as np.memmap writes "
                        "them, name it .bin"
                    )
                if _is_text(head):
                    raise DataError(f"{extent.path} holds text, not token ids: name it .txt or .jsonl")
                if program := _header_of(head):
                    raise DataError(
                        f"{extent.path} begins with a header of {program}: write the ids behind it to a file "
                        "of their own"
                    )
                whole = np.memmap(extent.path, dtype="<u2" if self._vocab <= 1 << 16 else "<u4", mode="r")
        except DataError:
            raise
        except Exception as error:  # a damaged header may cause any error
            raise DataError(f"{extent.path} is not an array of token ids ({error})") from error
        if whole.ndim != 1 or whole.dtype.kind not in "ui":
            raise DataError(
                f"{extent.path} must be a flat array of integers, got {whole.dtype} {whole.shape}"
            )
        # Extents count bytes of the file. Headers and rounding only move the boundaries between shards.
        first, last = (min(len(whole), at // whole.dtype.itemsize) for at in (extent.start, extent.stop))
        tokens: np.ndarray = whole[first:last]
        if len(tokens) == 0:
            return np.zeros(0, np.uint32)
        if tokens.min() < 0:
            raise DataError(f"{extent.path} holds the token {tokens.min()}: ids are not negative")
        if suffix_of(extent.path) != ".bin":
            self._check(tokens, str(extent.path))
            return tokens
        bits = 8 * whole.dtype.itemsize
        self._check(tokens, f"{extent.path}, read as ids of {bits} bits,")
        if len(whole) > _FEW_IDS and not whole[1 : 1 << 16 : 2].any():
            raise DataError(
                f"{extent.path} has a zero for every second id, as ids of {2 * bits} bits have: write them "
                f"in {bits}"
            )
        return tokens

    def _check(self, ids: np.ndarray, place: str) -> None:
        check_tokens(ids, self._vocab, None if self.source.is_tokens else self._tokenizer, place)


@dataclass
class _Group:
    """Parts whose windows are shuffled together."""

    first: int
    """The number of its first window in the stream."""
    places: list[tuple[int, int, int]]
    """(shard, part, window) in the order of the stream."""


class Stream:
    """The samples of one source in order, pass after pass without end. It may be used from any thread."""

    def __init__(
        self, tokenized: TokenizedSource, *, sequence: int, seed: int, name: str, end: int | None = None
    ) -> None:
        """`end` is the token that ends a document; with None a sample counts as one document."""
        self.tokenized = tokenized
        self.end = end
        self._sequence = sequence
        self._seed = seed
        self._name = name
        self._groups: list[_Group] = []
        self._end = 0
        self._walk = self._groups_in_order()
        self._extending = threading.Lock()
        self._dropped: Counter[str] = Counter()
        self.failure: Exception | None = None
        """The error that ended reading for good. No samples follow those that are ready."""

    def prepare(self, index: int) -> int:
        """Tokenize up to sample `index`. Returns the number of samples that are ready."""
        while self._end <= index:
            with self._extending:
                if self._end <= index:
                    self._extend()
        return self._end

    def extend(self) -> None:
        with self._extending:
            self._extend()

    def _extend(self) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            group = next(self._walk)
        except Exception as error:
            self.failure = error
            raise
        self._groups.append(group)
        self._end = group.first + len(group.places)

    @property
    def dropped(self) -> dict[str, int]:
        """The documents left out of the shards tokenized so far, by reason. Each counts once."""
        return dict(self._dropped)

    def _first_parts(self) -> list[tuple[int, int]]:
        """The shard and number of the first group's parts."""
        return sorted({place[:2] for group in self._groups[:1] for place in group.places})

    def counts(self) -> list[Counts]:
        """The counts of the first group's parts."""
        all_counts = [self.tokenized.counts(*place) for place in self._first_parts()]
        return [counts for counts in all_counts if counts is not None]

    def first_tokens(self) -> list[np.ndarray]:
        """The tokens of the first group's parts."""
        return [self.tokenized.part(*place).tokens for place in self._first_parts()]

    def longer_than_samples(self) -> tuple[int, int]:
        """How many conversations of the first group are longer than a sample, and how many it has."""
        longer = total = 0
        for place in self._first_parts():
            if (mask := self.tokenized.part(*place).mask) is not None:
                lengths = np.diff(np.append(np.flatnonzero(mask & BEGINS), len(mask)))
                longer += int(np.count_nonzero(lengths > self._sequence + 1))
                total += len(lengths)
        return longer, total

    def estimated_tokens(self) -> int:
        """The tokens of the source, estimated from its first shards. It is too low if these have over
        `MOST_PARTS` parts."""
        shards = sorted({place[0] for group in self._groups[:1] for place in group.places})
        tokens = 0
        with self._extending:
            for shard in shards:
                for part in range(MOST_PARTS):
                    if (counts := self.tokenized.counts(shard, part)) is None:
                        break
                    tokens += counts.tokens
        return round(tokens / len(shards) * len(self.tokenized.source.shards)) if shards else 0

    @property
    def groups(self) -> int:
        """The number of groups that are ready."""
        return len(self._groups)

    def group_of(self, index: int) -> int:
        """The group that holds a sample which is ready."""
        return bisect_right(self._groups, index, key=lambda group: group.first) - 1

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens [sequence + 1] of sample `index`, and their mask."""
        self.prepare(index)
        group = self._groups[self.group_of(index)]
        return self._cut(*group.places[index - group.first])

    def _cut(self, shard: int, number: int, window: int) -> tuple[np.ndarray, np.ndarray | None]:
        part = self.tokenized.part(shard, number)
        start = window * self._sequence
        cut = slice(start, start + self._sequence + 1)
        return part.tokens[cut], None if part.mask is None else part.mask[cut]

    def in_order(self, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """The first samples as from `window`, but in the order of the listing."""
        parts = self._parts(np.arange(len(self.tokenized.source.shards)), self._dropped)
        places = ((shard, part, window) for shard, part, count in parts for window in range(count))
        yield from (self._cut(*place) for place in islice(places, limit))

    def _groups_in_order(self) -> Iterator[_Group]:
        first = number = 0
        while True:
            order = generator(self._seed, step=number, layer=self._name, purpose="shard order").permutation(
                len(self.tokenized.source.shards)
            )
            began = first
            parts = self._parts(order, self._dropped if number == 0 else Counter())
            count = 0
            while several := list(islice(parts, GROUP_PARTS)):
                places = [
                    (shard, part, window) for shard, part, windows in several for window in range(windows)
                ]
                if places:
                    random = generator(
                        self._seed, step=number, microbatch=count, layer=self._name, purpose="window order"
                    )
                    yield _Group(first, [places[at] for at in random.permutation(len(places))])
                    first += len(places)
                count += 1
            if first == began:
                raise self.too_short()
            number += 1

    def too_short(self) -> DataError:
        """The error for a source whose documents fill no sample, with the reasons for left-out documents."""
        path = self.tokenized.source.path
        all_counts = [self.tokenized.counts(shard, 0) for shard in range(len(self.tokenized.source.shards))]
        if sum(counts.documents for counts in all_counts if counts) <= self._dropped.total():
            return nothing_left(path, self._dropped)
        reasons = f" (left out: {listed(self._dropped)})" if self._dropped else ""
        return DataError(
            f"{path} has no part of {self._sequence + 1} tokens{reasons}: give more text or lower [model] "
            "sequence"
        )

    def _parts(self, order: np.ndarray, dropped: Counter[str]) -> Iterator[tuple[int, int, int]]:
        for shard in map(int, order):
            part = 0
            while (counts := self.tokenized.counts(shard, part)) is not None:
                dropped.update(counts.dropped)
                yield shard, part, max(0, counts.tokens - 1) // self._sequence
                part += 1


class ShardedCorpus:
    """Batches from streams of shards. A thread tokenizes ahead during training."""

    def __init__(
        self, streams: list[Stream], weights: list[float], *, sequence: int, global_batch: int, seed: int
    ) -> None:
        shares = np.array(weights or [1.0] * len(streams))
        self.streams = streams
        self.sequence = sequence
        self.global_batch = global_batch
        self.weights: np.ndarray = shares / shares.sum()
        """Each stream's share of the samples."""
        self._mixture = Mixture(self.weights, seed)
        self._lock = threading.Lock()
        self._used = {0: 0}
        self._wake = threading.Event()
        self._closed = False
        self._worker: threading.Thread | None = None

    windows = 1
    """A placeholder: the number of samples in a pass is unknown. Nothing that needs it is allowed with
    shards."""

    def fingerprint(self) -> str:
        """The SHA-256 of the listing. A resumed run needs the same sources."""
        keys = [stream.tokenized.key for stream in self.streams]
        return sha256(repr((keys, self.weights.tolist())).encode()).hexdigest()

    def batch(self, step: int) -> np.ndarray:
        """The tokens of a step, int64 [global_batch, sequence + 1]. It may be called from any thread."""
        return np.stack([tokens for tokens, _ in self._samples(step)]).astype(np.int64)

    def inputs(self, step: int) -> np.ndarray:
        """The inputs of a step, int64 [global_batch, sequence]."""
        return self.batch(step)[:, :-1]

    def labels(self, step: int) -> np.ndarray:
        """The labels of a step, int64 [global_batch, sequence]; `IGNORED` where a token does not count."""
        rows = []
        for tokens, mask in self._samples(step):
            labels = tokens[1:].astype(np.int64)
            rows.append(labels if mask is None else np.where(mask[1:] & COUNTS, labels, IGNORED))
        return np.stack(rows)

    def documents(self, step: int) -> np.ndarray:
        """Where documents begin in the inputs of a step, bool [global_batch, sequence]."""
        end = self.streams[0].end
        rows = [
            starts_in(ids[:-1], None if mask is None else mask[:-1], end) for ids, mask in self._samples(step)
        ]
        return np.stack(rows)

    @property
    def dropped(self) -> dict[str, int]:
        """The documents of all sources left out so far, by reason. The counts grow as shards are
        tokenized."""
        total: Counter[str] = Counter()
        for stream in self.streams:
            total.update(stream.dropped)
        return dict(total)

    def known(self, windows: np.ndarray) -> int:
        """As `Corpus.known`, of the groups with which the sources begin."""
        return known(windows, (tokens for stream in self.streams for tokens in stream.first_tokens()))

    def estimated_tokens(self) -> int:
        """The tokens of all sources, estimated from the shards that are tokenized."""
        return sum(stream.estimated_tokens() for stream in self.streams)

    def validation_windows(self, limit: int | None = None) -> np.ndarray:
        """No windows are held out: [0, sequence + 1]."""
        return np.zeros((0, self.sequence + 1), dtype=np.int64)

    def close(self) -> None:
        """Stop tokenizing ahead."""
        self._closed = True
        self._wake.set()
        if self._worker is not None:
            self._worker.join(CLOSE_SECONDS)

    def _samples(self, step: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
        first = step * self.global_batch
        with self._lock:
            places = [self._mixture.source_of(sample) for sample in range(first, first + self.global_batch)]
            for source, index in places:
                self._used[source] = max(self._used.get(source, 0), index)
            if self._worker is None and not self._closed:
                self._worker = threading.Thread(target=self._tokenize_ahead, name="tokenizer", daemon=True)
                self._worker.start()
        self._wake.set()
        # Failures beyond this step count too: training up to there would be in vain.
        for stream in self.streams:
            if stream.failure is not None:
                raise stream.failure
        return [self.streams[source].window(index) for source, index in places]

    def _tokenize_ahead(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            for source, used in dict(self._used).items():
                stream = self.streams[source]
                try:
                    stream.prepare(used)
                    while not self._closed and stream.groups - stream.group_of(used) <= GROUPS_AHEAD:
                        stream.extend()
                except Exception:  # the stream keeps the error for the next reader
                    return


TrainingData = Corpus | ShardedCorpus


def load_data(config: RunConfig, tell: Tell = lambda _: None, folder: Path | None = None) -> TrainingData:
    """The training data of a run file, whole or in shards.

    Args:
        tell: receives progress lines of a long tokenizing.
        folder: where tokens are kept; by default `cache_folder`.

    Raises:
        DataError: the data is missing, unreadable, empty or too short. The message says what to do.
        ConfigError: the tokenizer has more tokens than the model's vocabulary.
    """
    data, sequence, seed = config.data, config.model.sequence, config.run.seed
    batch = config.training.global_batch
    if not in_shards(data):
        return Corpus.load(
            data,
            sequence=sequence,
            global_batch=batch,
            seed=seed,
            vocab=config.model.vocab,
            fixed=bool(config.model.from_),
            tell=tell,
        )
    streams = [
        open_stream(config, name, str(number), folder)
        for number, name in enumerate(data.sources or (data.path,))
    ]
    _report_repeated(data.sources)
    corpus = ShardedCorpus(streams, list(data.weights), sequence=sequence, global_batch=batch, seed=seed)
    for stream in streams:
        stream.prepare(0)
        shards = len(stream.tokenized.source.shards)
        rest = f": the first of {shards} shards is tokenized, the rest beside training" if shards > 1 else ""
        tell(f"{stream.tokenized.source.path} is read in shards{rest}")
        longer, total = stream.longer_than_samples()
        if longer * LONG_SHARE > total:
            logger.warning(
                "%d of the first %d conversations of %s have more than model.sequence = %d tokens and are "
                "cut: answers may lack their questions",
                longer,
                total,
                stream.tokenized.source.path,
                sequence,
            )
    return corpus


def _report_repeated(sources: Sequence[str]) -> None:
    """Report sources that are named twice, directly, by a folder around them, or as copies."""
    paths = [expanded(name, "data.sources").resolve() for name in sources]
    for (name, first), (other, second) in combinations(zip(sources, paths, strict=True), 2):
        if first.is_relative_to(second) or second.is_relative_to(first) or _is_copy(first, second):
            logger.warning(
                "%s and %s of data.sources have the same files, which are read twice: data.weights gives a "
                "larger share",
                name,
                other,
            )


def _is_copy(path: Path, other: Path) -> bool:
    """Whether these are files of the same size with the same ends."""
    if not (path.is_file() and other.is_file()) or (size := path.stat().st_size) != other.stat().st_size:
        return False
    return read_ends(path, size) == read_ends(other, size)


def _header_of(head: bytes) -> str:
    """The program whose header begins a file of token ids; empty for none."""
    first, second = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4))
    if first in _LLM_C:
        return "llm.c (1,024 bytes)"
    if head.startswith(_LITGPT):
        return "litgpt (24 bytes)"
    # The number of items, and the offset of the first, which stands behind all offsets.
    return "litdata (its index.json says where ids are)" if first and second == 4 * (first + 2) else ""


def _is_text(head: bytes) -> bool:
    """Whether the first 256 bytes of a file are text. Those of token ids have zeros, or are no UTF-8."""
    # The last character may be cut off.
    return len(head) == 256 and 0 not in head and len(head.decode(errors="ignore").encode()) > 252


def starts_in(tokens: np.ndarray, mask: np.ndarray | None, end: int | None) -> np.ndarray:
    """Where documents begin in a sample, bool [n]: by its mask, or after each `end`. Its first token always
    counts."""
    starts: np.ndarray = document_starts(tokens[None], None if mask is not None else end)[0]
    if mask is not None:
        starts |= (mask & BEGINS) != 0
    return starts


def open_stream(config: RunConfig, path: str, name: str, folder: Path | None = None) -> Stream:
    """The samples of one source. `name` distinguishes its order from those of other sources. Raises as
    `load_data`."""
    data, vocab = config.data, config.model.vocab
    tokenizer = load_tokenizer(data.tokenizer)
    chat = chat_encoder(data) if data.format == "chat" else None
    source = list_source(path)
    if not source.is_tokens:
        check_vocabulary(tokenizer, data, vocab, bool(config.model.from_))
    if source.is_tokens and chat is not None:
        raise ConfigError(f'{path} holds token ids, and data.format = "chat" needs conversations')
    tokenized = TokenizedSource(source, data, tokenizer, chat, vocab, folder or cache_folder() / "shards")
    apart = data.separate_documents and chat is None
    end = end_of_text(tokenizer, data) if apart else None
    return Stream(tokenized, sequence=config.model.sequence, seed=config.run.seed, name=name, end=end)


def in_shards(data: DataSection) -> bool:
    """Whether `[data]` is read in shards, by `order` or by the kind of its sources.

    Raises:
        ConfigError: a path names the home directory of an unknown user.
    """
    if data.order != "auto":
        return data.order == "shards"
    if data.sources or data.format == "chat":
        return True
    if data.path == STDLIB:
        return False
    path = expanded(data.path, "data.path")
    return needs_shards(path) or _text_bytes(path) >= LARGE_BYTES


def _text_bytes(path: Path) -> int:
    try:
        if path.is_dir():
            return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return path.stat().st_size
    except OSError:
        return 0  # reading it reports the error
