"""The beginning of a run's training data as tokens, for a check before a run."""

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from node.config.schema import RunConfig
from node.data.data import Corpus
from node.data.shards import COUNTS, ShardedCorpus, Stream, load_data
from node.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class SourcePreview:
    """The beginning and the counts of one source."""

    path: str
    weight: float
    """Its share of the samples."""
    files: int
    bytes: int
    shards: int
    documents: int
    """The documents in the shards that are tokenized."""
    tokens: int
    labels: int
    dropped: dict[str, int]
    """The number of documents left out, by reason."""
    ids: tuple[int, ...]
    """The first tokens of the first sample."""
    mask: tuple[bool, ...]
    """Which of these tokens count as labels."""
    text: str
    """These tokens as text. With a mask, labels are between [[ and ]]."""


@dataclass(frozen=True)
class Preview:
    vocabulary: int
    masked: bool
    sources: tuple[SourcePreview, ...]

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


def preview(config: RunConfig, tokens: int) -> Preview:
    """The first `tokens` tokens of each source. Raises DataError and ConfigError as `load_data`."""
    corpus = load_data(config)
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer)
    masked = data.masks_labels
    if isinstance(corpus, ShardedCorpus):
        sources = tuple(
            _of_stream(stream, float(weight), tokenizer.decode, tokens, masked=masked)
            for stream, weight in zip(corpus.streams, corpus.weights, strict=True)
        )
        corpus.close()
    else:
        sources = (_of_whole(corpus, data.path, tokenizer.decode, tokens),)
    return Preview(tokenizer.vocabulary, masked, sources)


def _of_stream(stream: Stream, weight: float, decode: Any, count: int, *, masked: bool) -> SourcePreview:
    ids, mask = stream.window(0)
    ids = ids[:count]
    counted = np.ones(len(ids), bool) if mask is None else mask[:count] & COUNTS != 0
    dropped: Counter[str] = Counter()
    parts = stream.counts()
    for counts in parts:
        dropped.update(counts.dropped)
    tokens = sum(counts.tokens for counts in parts)
    source = stream.tokenized.source
    return SourcePreview(
        path=source.path,
        weight=weight,
        files=len({extent.path for shard in source.shards for extent in shard.extents}),
        bytes=source.bytes,
        shards=len(source.shards),
        documents=sum(counts.documents for counts in parts),
        tokens=tokens,
        labels=sum(counts.labels for counts in parts) if masked else tokens,
        dropped=dict(dropped),
        ids=tuple(map(int, ids)),
        mask=tuple(map(bool, counted)),
        text=_marked(ids, counted, decode) if masked else decode(ids),
    )


def _of_whole(corpus: Corpus, path: str, decode: Any, count: int) -> SourcePreview:
    ids = corpus.batch(0)[0, :count]
    return SourcePreview(
        path=path,
        weight=1.0,
        files=0,
        bytes=0,
        shards=1,
        documents=0,
        tokens=len(corpus.training),
        labels=len(corpus.training),
        dropped=corpus.dropped,
        ids=tuple(map(int, ids)),
        mask=(True,) * len(ids),
        text=decode(ids),
    )


def _marked(ids: np.ndarray, counted: np.ndarray, decode: Any) -> str:
    """The text, with labels between [[ and ]]."""
    edges = [0, *(int(at) for at in np.flatnonzero(np.diff(counted.astype(np.int8))) + 1), len(ids)]
    pieces = []
    for start, stop in pairwise(edges):
        text = decode(ids[start:stop])
        pieces.append(f"[[{text}]]" if stop > start and counted[start] else text)
    return "".join(pieces)
