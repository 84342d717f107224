"""Token batches as a pure function of (seed, step). This module imports no torch, since only the coordinator
reads data.

Tokens are bytes, or ids of a byte-pair encoding. A window is `sequence` + 1 tokens: its inputs are all but
the last, its labels all but the first. The windows of one pass start `sequence` tokens apart, so that each
token is a label at most once in a pass.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from types import MappingProxyType

import numpy as np

from node.config.schema import DataSection
from node.data.documents import read_text
from node.data.order import SampleOrder
from node.data.text import SEPARATOR
from node.data.token_cache import cache_folder, tokens_of
from node.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from wire.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

VALIDATION_SHARE = 100
"""One token in this many, at the end of the text, is held out from training."""
VALIDATION_WINDOWS = 16
"""At least this many windows are held out, but never more than a tenth of the text."""

MOST_PADDING = 1.1
"""A checkpoint has at most this many times the tokens of its own tokenizer."""
SEARCH_TOKENS = 4 << 20
"""The tokens in which windows are searched for at a time."""


class Corpus:
    """The text as tokens, divided into a training part and a held-out tail."""

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        sequence: int,
        global_batch: int,
        seed: int,
        shift: bool = True,
        end: int | None = None,
        dropped: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            tokens: [N], of any unsigned type.
            sequence: tokens per sample.
            global_batch: samples per step.
            shift: start every pass at another token below `sequence`, so that samples do not repeat.
            end: the token that ends a document; with None a sample counts as one document.
            dropped: the number of documents left out, by reason.

        Raises:
            DataError: fewer than `sequence` + 1 tokens.
        """
        if len(tokens) < sequence + 1:
            raise DataError(
                f"the text has {len(tokens)} tokens; a window of sequence {sequence} needs {sequence + 1}: "
                "give more text or lower [model] sequence"
            )
        held_out = min(
            max(len(tokens) // VALIDATION_SHARE, VALIDATION_WINDOWS * sequence + 1), len(tokens) // 10
        )
        if held_out < sequence + 1 or len(tokens) - held_out < sequence + 1:
            held_out = 0
        self.training = tokens[: len(tokens) - held_out]
        self.validation = tokens[len(tokens) - held_out :]
        self.sequence = sequence
        self.global_batch = global_batch
        self.seed = seed
        self._end = end
        self.dropped = dict(dropped)
        """The number of documents left out, by reason."""

        room = len(self.training) - 1
        # One window fewer than fit, so that they all have room with every phase below `sequence`.
        self.windows = max(1, room // sequence - 1) if shift else room // sequence
        phases = min(sequence, room - self.windows * sequence + 1) if shift else 1
        self._order = SampleOrder(windows=self.windows, phases=phases, global_batch=global_batch, seed=seed)

    @classmethod
    def load(
        cls,
        data: DataSection,
        *,
        sequence: int,
        global_batch: int,
        seed: int,
        vocab: int | None = None,
        fixed: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> "Corpus":
        """Read the text that `[data]` names, as tokens.

        Args:
            vocab: the size of the model's vocabulary, which must contain every token; None skips the check.
            fixed: `vocab` is a checkpoint's, so the tokenizer may have more tokens than that.
            tell: receives progress lines when a long text is tokenized for the first time.

        Raises:
            DataError: the text is missing, unreadable, empty or too short. The message says what to do.
            ConfigError: the tokenizer or the text has tokens beyond `vocab`.
        """
        tokenizer = load_tokenizer(data.tokenizer)
        if vocab is not None:
            check_vocabulary(tokenizer, data, vocab, fixed)
        end = end_of_text(tokenizer, data) if data.separate_documents else None
        dropped: Counter[str] = Counter()
        try:
            text = read_text(data, dropped)
            if data.tokenizer == BYTES:
                tokens = np.frombuffer(text, dtype=np.uint8)
            else:
                tokens = tokens_of(text, tokenizer, cache_folder(), tell)
                if vocab is not None:
                    check_tokens(tokens, vocab, tokenizer, data.path)
        except MemoryError:
            raise DataError(
                f'the text at {data.path} does not fit in the memory: set [data] order to "shards"'
            ) from None
        return cls(
            tokens,
            sequence=sequence,
            global_batch=global_batch,
            seed=seed,
            shift=data.shift,
            end=end,
            dropped=dropped,
        )

    def fingerprint(self) -> str:
        """The SHA-256 of the training tokens. A resumed run needs the same text."""
        return sha256(self.training.data).hexdigest()

    def batch(self, step: int) -> np.ndarray:
        """The tokens of a step, [global_batch, sequence + 1]. Microbatches are consecutive rows.

        It may be called for any step in any order, and from any thread.
        """
        first = step * self.global_batch
        return np.stack([self._window(sample) for sample in range(first, first + self.global_batch)])

    def inputs(self, step: int) -> np.ndarray:
        """The inputs of a step, [global_batch, sequence]."""
        return self.batch(step)[:, :-1]

    def labels(self, step: int) -> np.ndarray:
        """The labels of a step, [global_batch, sequence]. Every token counts."""
        return self.batch(step)[:, 1:]

    def documents(self, step: int) -> np.ndarray:
        """Where documents begin in the inputs of a step, bool [global_batch, sequence]."""
        return document_starts(self.inputs(step), self._end)

    def close(self) -> None:
        """Do nothing; `ShardedCorpus` has a thread to end."""

    def known(self, windows: np.ndarray) -> int:
        """How many of these windows stand in the training text."""
        return known(windows, [self.training])

    def validation_windows(self, limit: int | None = None) -> np.ndarray:
        """The held-out windows from the start of the tail, [n, sequence + 1]. n is 0 for a tiny text."""
        return windows_of(self.validation, self.sequence, limit)

    def _window(self, sample: int) -> np.ndarray:
        number, index = divmod(sample, self.windows)
        current = self._order.pass_of(number)
        start = current.phase + int(current.order[index]) * self.sequence
        return self.training[start : start + self.sequence + 1]


def end_of_text(tokenizer: Tokenizer, data: DataSection) -> int:
    """The token that ends a document.

    Raises:
        ConfigError: the tokenizer writes several tokens there.
    """
    (ids,) = tokenizer.encode([SEPARATOR])
    if len(ids) != 1:
        raise ConfigError(
            f"data.separate_documents needs an end of text of one token, and the tokenizer in "
            f"{data.tokenizer} writes {len(ids)}: add one to it"
        )
    return int(ids[0])


def document_starts(inputs: np.ndarray, end: int | None) -> np.ndarray:
    """Where documents begin in samples [n, sequence], bool: at a sample's first token and after each
    `end`."""
    starts = np.zeros(inputs.shape, dtype=bool)
    starts[:, :1] = True
    if end is not None:
        starts[:, 1:] = inputs[:, :-1] == end
    return starts


def windows_of(tokens: np.ndarray, sequence: int, limit: int | None = None) -> np.ndarray:
    """At most `limit` windows of `tokens` from the start, [n, sequence + 1]. Each token is a label at most
    once."""
    count = max(0, len(tokens) - 1) // sequence
    count = count if limit is None else min(count, limit)
    starts = np.arange(count) * sequence
    windows: np.ndarray = tokens[starts[:, None] + np.arange(sequence + 1)]
    return windows


def known(windows: np.ndarray, texts: Iterable[np.ndarray]) -> int:
    """How many windows [n, sequence + 1] stand in one of these texts of tokens."""
    new = list(windows)
    for tokens in texts:
        for start in range(0, len(tokens), SEARCH_TOKENS):
            if not new:
                break
            piece = tokens[start : start + SEARCH_TOKENS + windows.shape[1]].tobytes()
            new = [window for window in new if window.astype(tokens.dtype).tobytes() not in piece]
    return len(windows) - len(new)


def check_vocabulary(tokenizer: Tokenizer, data: DataSection, vocab: int, fixed: bool) -> None:
    """Check that a model with `vocab` tokens can have this tokenizer.

    With `fixed` this is not checked, because checkpoints lack rows for some tokens, such as those of images.
    Then the text's tokens are checked, and a tokenizer with far fewer tokens is reported, once.

    Raises:
        ConfigError: the tokenizer has more tokens.
    """
    if vocab < tokenizer.vocabulary and not fixed:
        raise ConfigError(
            f"model.vocab is {vocab}, but the tokenizer in {data.tokenizer} has {tokenizer.vocabulary} "
            f"tokens: set model.vocab to {tokenizer.vocabulary} or more"
        )
    if fixed and vocab > MOST_PADDING * tokenizer.vocabulary:
        _say_another(data.tokenizer, tokenizer.vocabulary, vocab)


@cache
def _say_another(tokenizer: str, tokens: int, vocab: int) -> None:
    logger.warning(
        "the tokenizer in data.tokenizer (%s) has %d tokens, and the checkpoint has %d: with a tokenizer "
        "other than its own, a model starts from nothing",
        tokenizer,
        tokens,
        vocab,
    )


def check_tokens(ids: np.ndarray, vocab: int, tokenizer: Tokenizer | None, place: str) -> None:
    """Check that the ids of `place` are tokens of a model with `vocab` tokens.

    Raises:
        ConfigError: an id is too large.
    """
    if len(ids) and (largest := int(ids.max())) >= vocab:
        text = "" if tokenizer is None else f" ({tokenizer.decode(np.array([largest]))!r})"
        raise ConfigError(
            f"{place} has the token {largest}{text}, but model.vocab is {vocab}: take it out of the text, or "
            f"set model.vocab to {largest + 1} or more if no checkpoint sets it"
        )


def text_windows(
    data: DataSection, path: str, sequence: int, limit: int | None = None, vocab: int | None = None
) -> np.ndarray:
    """The windows of the text at `path`, as from `windows_of`. Raises DataError and ConfigError as
    `Corpus.load`."""
    text = read_text(replace(data, path=path, sources=()))
    tokenizer = load_tokenizer(data.tokenizer)
    if data.tokenizer == BYTES:
        return windows_of(np.frombuffer(text, dtype=np.uint8), sequence, limit)
    windows = windows_of(tokens_of(text, tokenizer, cache_folder(), lambda _: None), sequence, limit)
    if vocab is not None:
        check_tokens(windows, vocab, tokenizer, path)
    return windows
