"""The samples of each step: a pure function of (seed, step), for the coordinator and every stage."""

from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from node.model.rng import generator

_KEPT = 3
"""Passes held at once: a step may touch two, and `known` looks at the one before."""
_KEPT_STEPS = 8
"""Results of `known` held at once: it is called for every tensor of a step."""
MIX_BLOCK = 1024


@dataclass(frozen=True)
class Pass:
    """One time through the training text."""

    number: int
    phase: int
    """How far into the text its first window starts."""
    order: np.ndarray
    """Window of each place, int64 [windows]."""


class SampleOrder:
    """Every pass goes once through all windows of the text, in a different order.

    Windows are numbered along the text. Safe to call from any thread.
    """

    def __init__(self, *, windows: int, phases: int = 1, global_batch: int, seed: int) -> None:
        """
        Args:
            windows: of one pass.
            phases: passes start this many tokens into the text at most; with 1 a window holds the same tokens
                in every pass.
        """
        self.windows = windows
        self._phases = phases
        self._global_batch = global_batch
        self._seed = seed
        self._lock = Lock()
        self._passes: dict[int, Pass] = {}
        self._known: dict[tuple[int, int], tuple[bool, ...]] = {}

    def pass_of(self, number: int) -> Pass:
        with self._lock:
            found = self._passes.get(number)
            if found is None:
                random = generator(self._seed, step=number, purpose="data order")
                phase = int(random.integers(self._phases))
                found = Pass(number, phase, random.permutation(self.windows))
                if len(self._passes) == _KEPT:
                    # The farthest: steps go forward, and back to what a failed step saw.
                    del self._passes[max(self._passes, key=lambda old: abs(old - number))]
                self._passes[number] = found
            return found

    def samples(self, step: int) -> tuple[int, ...]:
        """Windows that the step sees, [global batch]; microbatches are consecutive."""
        first = step * self._global_batch
        places = (divmod(place, self.windows) for place in range(first, first + self._global_batch))
        return tuple(int(self.pass_of(number).order[index]) for number, index in places)

    def known(self, step: int, since: int) -> tuple[bool, ...]:
        """For each sample of the step, whether one of the steps `since` to `step` - 1 has seen it."""
        with self._lock:
            found = self._known.get((step, since))
        if found is None:
            found = self._find_known(step, since)
            with self._lock:
                while len(self._known) >= _KEPT_STEPS:
                    del self._known[next(iter(self._known))]
                self._known[step, since] = found
        return found

    def _find_known(self, step: int, since: int) -> tuple[bool, ...]:
        number, index = divmod(step * self._global_batch, self.windows)
        last_seen = np.full(self.windows, -1, dtype=np.int64)
        if number > 0:
            before = self.pass_of(number - 1)
            last_seen[before.order] = np.arange(self.windows) + before.number * self.windows
        current = self.pass_of(number)
        last_seen[current.order[:index]] = np.arange(index) + number * self.windows
        earliest = since * self._global_batch
        return tuple(bool(last_seen[sample] >= earliest) for sample in self.samples(step))


@dataclass
class Mixture:
    """Which source each sample comes from: drawn block by block, in proportion."""

    weights: np.ndarray
    seed: int
    before: list[np.ndarray] = field(default_factory=list)
    """Samples of each source before each block."""

    def source_of(self, sample: int) -> tuple[int, int]:
        """(source, number of the sample within it)."""
        if len(self.weights) == 1:
            return 0, sample
        block, at = divmod(sample, MIX_BLOCK)
        if not self.before:
            self.before.append(np.zeros(len(self.weights), dtype=np.int64))
        while len(self.before) <= block:
            drawn = np.bincount(self._draw(len(self.before) - 1), minlength=len(self.weights))
            self.before.append(self.before[-1] + drawn)
        drawn = self._draw(block)
        source = int(drawn[at])
        return source, int(self.before[block][source] + np.count_nonzero(drawn[:at] == source))

    def _draw(self, block: int) -> np.ndarray:
        random = generator(self.seed, step=block, purpose="sources")
        # One draw in each of MIX_BLOCK equal strata: shares are exact to a sample a block.
        places = (np.arange(MIX_BLOCK) + random.random(MIX_BLOCK)) / MIX_BLOCK
        sources = np.searchsorted(np.cumsum(self.weights), places, side="right")
        return random.permutation(np.minimum(sources, len(self.weights) - 1))
