"""Samples that no step trains on: tokens, which of them count as labels, and where documents begin.

Torch-free. The held-out text is the end of the training text, or a source of its own, read in the order of
its listing: text, chat with its labels masked, parquet, Arrow, token arrays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from node.config.schema import RunConfig
from node.data.data import document_starts, end_of_text, text_windows
from node.data.shards import COUNTS, TrainingData, in_shards, open_stream, starts_in
from node.data.tokenizer import load_tokenizer
from node.model.labels import IGNORED, BatchPart, label_weight, to_bytes
from wire.errors import DataError

SEARCHED = 100
"""Times the samples that are wanted are looked at for some with labels."""


@dataclass(frozen=True)
class Samples:
    """Windows of `sequence` + 1 tokens: inputs are all but the last, labels all but the first."""

    windows: np.ndarray
    """[n, sequence + 1]"""
    labels: np.ndarray
    """int64 [n, sequence]; `IGNORED` where a token does not count."""
    documents: np.ndarray
    """Where documents begin, bool [n, sequence]."""

    @classmethod
    def of(cls, windows: np.ndarray) -> "Samples":
        """Windows in which every token counts, of one document each."""
        windows = windows.astype(np.int64)
        return cls(windows, windows[:, 1:], document_starts(windows[:, :-1], None))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, rows: slice) -> "Samples":
        return Samples(self.windows[rows], self.labels[rows], self.documents[rows])

    @property
    def label_weight(self) -> float:
        """As `node.model.labels.label_weight`, of all samples."""
        return label_weight(self.labels) if len(self) else 1.0

    @property
    def labelled(self) -> int:
        """How many of them have labels: the others count nowhere."""
        return int(np.count_nonzero((self.labels != IGNORED).any(axis=1)))

    def part(self, which: BatchPart) -> np.ndarray:
        """What nodes fetch, [n, sequence]."""
        if which is BatchPart.DOCUMENTS:
            return self.documents
        return self.labels if which is BatchPart.LABELS else self.windows[:, :-1]

    def whole_microbatches(self, size: int) -> "Samples":
        """Without the rest of a last microbatch of `size` samples."""
        return self[: len(self) // size * size]


def part_of(
    corpus: TrainingData, step: int, which: BatchPart, groups: Sequence[int] = (), count: int = 1
) -> np.ndarray:
    """What nodes fetch of a step, [global batch, sequence]: of all `count` gradient groups or of `groups`."""
    wanted = {
        BatchPart.INPUTS: corpus.inputs,
        BatchPart.LABELS: corpus.labels,
        BatchPart.DOCUMENTS: corpus.documents,
    }
    whole = wanted[which](step)
    if not groups:
        return whole
    parts = np.split(whole, count)
    return np.concatenate([parts[group] for group in groups])


def packed_parts(
    corpus: TrainingData, steps: Iterable[int], which: BatchPart, groups: Sequence[int] = (), count: int = 1
) -> bytes:
    """`part_of` each of these steps, as nodes fetch it, one after another."""
    return b"".join(to_bytes(which, part_of(corpus, step, which, groups, count)) for step in steps)


def held_out_samples(config: RunConfig, corpus: TrainingData) -> Samples:
    """Those that a run measures its loss on: whole microbatches; none if the run file does not ask for any.

    Raises DataError when it does and the text is too short.
    """
    data, microbatch = config.data, config.training.microbatch
    found = samples_of(config, corpus, data.valid if data.valid_every else "", data.valid_samples)
    if not data.valid_every:
        return found[:0]
    if len(found) < microbatch:
        remedy = "name some in data.valid, or set data.valid_every = 0"
        if not data.valid and in_shards(data):
            raise DataError(f"of conversations and of text in shards nothing is held out: {remedy}")
        raise DataError(
            f"the held-out text gives {len(found)} samples; data.valid_every needs {microbatch} "
            f"(a microbatch): give more text, {remedy}"
        )
    return found.whole_microbatches(microbatch)


def samples_of(config: RunConfig, corpus: TrainingData | None, path: str, limit: int | None) -> Samples:
    """The first samples of the source at `path`, or without one of the text that `corpus` holds out.

    Args:
        limit: at most so many; None takes all of a text, and of other sources a thousand.

    Raises:
        DataError, ConfigError: as `load_data`.
    """
    data, sequence = config.data, config.model.sequence
    if path and in_shards(replace(data, path=path, sources=())):
        return _of_stream(config, path, 1000 if limit is None else limit)
    if path:
        windows = text_windows(data, path, sequence, limit, config.model.vocab)
    else:
        assert corpus is not None, "without a path, the corpus holds samples out"
        windows = corpus.validation_windows(limit)
    found = Samples.of(windows)
    if not data.separate_documents:
        return found
    end = end_of_text(load_tokenizer(data.tokenizer), data)
    return replace(found, documents=document_starts(found.windows[:, :-1], end))


def _of_stream(config: RunConfig, path: str, limit: int) -> Samples:
    """Samples without labels count for nothing, and are left out; a few may fill up the last microbatch. All
    are such samples only if the first `SEARCHED` times the limit have no labels."""
    stream = open_stream(config, path, "held out")
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    fillers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for tokens, mask in stream.in_order(SEARCHED * limit):
        ids = tokens.astype(np.int64)
        labels = ids[1:] if mask is None else np.where(mask[1:] & COUNTS, ids[1:], IGNORED)
        sample = ids, labels, starts_in(ids[:-1], None if mask is None else mask[:-1], stream.end)
        if (labels != IGNORED).any():
            found.append(sample)
        elif len(fillers) < limit:
            fillers.append(sample)
        if len(found) == limit:
            break
    if len(found) < limit:
        found += fillers[: -len(found) % config.training.microbatch if found else limit]
    if not found:
        raise stream.too_short()
    windows, wanted, starts = map(np.stack, zip(*found, strict=True))
    return Samples(windows, wanted, starts)
