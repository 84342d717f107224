"""Samples on which no step trains: tokens, which of them count as labels, and where documents begin.

The held-out text is the end of the training text, or a source of its own (text, chat with masked labels,
parquet, Arrow, token arrays), which is read in the order of its listing. This module imports no torch.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from node.config.schema import DataSection, RunConfig
from node.data.data import document_starts, end_of_text, text_windows
from node.data.shards import COUNTS, TrainingData, in_shards, open_stream, starts_in
from node.data.text import STDLIB, expanded
from node.data.tokenizer import load_tokenizer
from node.model.labels import IGNORED, BatchPart, label_weight, to_bytes
from wire.errors import DataError

log = logging.getLogger(__name__)

SEARCHED = 100
"""At most this many times the wanted number of samples are searched for some with labels."""

LOOKED_AT = 4
"""This many samples are looked for in the training text."""


@dataclass(frozen=True)
class Samples:
    """Windows of `sequence` + 1 tokens: inputs are all but the last, labels all but the first."""

    windows: np.ndarray
    """Token ids, int64 [n, sequence + 1]."""
    labels: np.ndarray
    """int64 [n, sequence]; `IGNORED` where a token does not count."""
    documents: np.ndarray
    """Where documents begin, bool [n, sequence]."""

    @classmethod
    def of(cls, windows: np.ndarray) -> "Samples":
        """Samples of windows in which every token counts. Each is one document."""
        windows = windows.astype(np.int64)
        return cls(windows, windows[:, 1:], document_starts(windows[:, :-1], None))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, rows: slice) -> "Samples":
        return Samples(self.windows[rows], self.labels[rows], self.documents[rows])

    @property
    def label_weight(self) -> float:
        """`node.model.labels.label_weight` of all samples."""
        return label_weight(self.labels) if len(self) else 1.0

    @property
    def labelled(self) -> int:
        """The number of samples with labels. The others do not count anywhere."""
        return int(np.count_nonzero((self.labels != IGNORED).any(axis=1)))

    def part(self, which: BatchPart) -> np.ndarray:
        """The part that nodes fetch, [n, sequence]."""
        if which is BatchPart.DOCUMENTS:
            return self.documents
        return self.labels if which is BatchPart.LABELS else self.windows[:, :-1]

    def whole_microbatches(self, size: int) -> "Samples":
        """The samples without an incomplete last microbatch of `size` samples."""
        return self[: len(self) // size * size]


def part_of(
    corpus: TrainingData, step: int, which: BatchPart, groups: Sequence[int] = (), count: int = 1
) -> np.ndarray:
    """The part of a step that nodes fetch, [global batch, sequence]: of all `count` gradient groups, or of
    `groups`."""
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
    """`part_of` these steps as bytes, one after another, as nodes fetch them."""
    return b"".join(to_bytes(which, part_of(corpus, step, which, groups, count)) for step in steps)


def held_out_samples(config: RunConfig, corpus: TrainingData) -> Samples:
    """The samples on which a run measures its loss: whole microbatches, or none if the run file does not ask
    for it.

    Raises:
        DataError: the run file asks for it, and the text is too short.
    """
    data, microbatch = config.data, config.training.microbatch
    samples = samples_of(config, corpus, data.valid if data.valid_every else "", data.valid_samples)
    if not data.valid_every:
        if data.valid:
            log.warning("the loss of data.valid is not measured in this run: data.valid_every is 0")
        return samples[:0]
    if data.valid and not _report_trained_on(data):
        looked_at = samples.windows[:LOOKED_AT]
        if count := corpus.known(looked_at):
            log.warning(
                "%d of the first %d samples of %s stand in the training text too: their loss is of text that "
                "is known",
                count,
                len(looked_at),
                data.valid,
            )
    if len(samples) < microbatch:
        remedy = "name some in data.valid, or set data.valid_every = 0"
        if not data.valid and in_shards(data):
            raise DataError(f"from conversations and text in shards nothing is held out: {remedy}")
        raise DataError(
            f"the held-out text gives {len(samples)} samples; data.valid_every needs {microbatch} "
            f"(a microbatch): give more text, {remedy}"
        )
    return samples.whole_microbatches(microbatch)


def _report_trained_on(data: DataSection) -> bool:
    """Report held-out data whose files are among the training data. Returns whether there are some."""
    reported = False
    valid = expanded(data.valid, "data.valid").resolve()
    for name in data.sources or (data.path,):
        source = expanded(name, "data.path").resolve()
        if name != STDLIB and (valid.is_relative_to(source) or source.is_relative_to(valid)):
            log.warning("%s is trained on too, by %s: its loss is of text that is known", data.valid, name)
            reported = True
    return reported


def samples_of(config: RunConfig, corpus: TrainingData | None, path: str, limit: int | None) -> Samples:
    """The first samples of the source at `path`, or without a path of the text that `corpus` holds out.

    Args:
        limit: the most samples. With None all of a text, and of other sources a thousand.

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
    samples = Samples.of(windows)
    if not data.separate_documents:
        return samples
    end = end_of_text(load_tokenizer(data.tokenizer), data)
    return replace(samples, documents=document_starts(samples.windows[:, :-1], end))


def _of_stream(config: RunConfig, path: str, limit: int) -> Samples:
    """The first samples of a source that have labels.

    Samples without labels are left out, but a few of them may complete the last microbatch. Only if none of
    the first `SEARCHED` times `limit` samples has labels are such samples returned.
    """
    stream = open_stream(config, path, "held out")
    labelled: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    fillers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for tokens, mask in stream.in_order(SEARCHED * limit):
        ids = tokens.astype(np.int64)
        labels = ids[1:] if mask is None else np.where(mask[1:] & COUNTS, ids[1:], IGNORED)
        sample = ids, labels, starts_in(ids[:-1], None if mask is None else mask[:-1], stream.end)
        if (labels != IGNORED).any():
            labelled.append(sample)
        elif len(fillers) < limit:
            fillers.append(sample)
        if len(labelled) == limit:
            break
    if len(labelled) < limit:
        labelled += fillers[: -len(labelled) % config.training.microbatch if labelled else limit]
    if not labelled:
        raise stream.too_short()
    windows, wanted, starts = map(np.stack, zip(*labelled, strict=True))
    return Samples(windows, wanted, starts)
