"""The samples of each step: a pure function of (seed, step), for the coordinator and every stage."""

from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from node.model.rng import generator

_KEPT = 3
"""The passes that are kept. A step may need two, and `known` looks at the one before."""
_KEPT_STEPS = 8
"""The results of `known` that are kept. It is called for every tensor of a step."""
MIX_BLOCK = 1024
"""The samples of a block in which the sources have exact shares."""


@dataclass(frozen=True)
class Pass:
    """One pass through the training text."""

    number: int
    phase: int
    """The offset of its first window in the text."""
    order: np.ndarray
    """The window at each position, int64 [windows]."""


class SampleOrder:
    """Every pass goes once through all windows of the text, in a different order.

    Windows are numbered along the text. All methods may be called from any thread.
    """

    def __init__(self, *, windows: int, phases: int = 1, global_batch: int, seed: int) -> None:
        """
        Args:
            windows: the windows of one pass.
            phases: passes start less than this many tokens into the text. With 1, a window holds the same
                tokens in every pass.
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
            current = self._passes.get(number)
            if current is None:
                random = generator(self._seed, step=number, purpose="data order")
                phase = int(random.integers(self._phases))
                current = Pass(number, phase, random.permutation(self.windows))
                if len(self._passes) == _KEPT:
                    # The farthest pass: steps go forward, or back to those of a failed step.
                    del self._passes[max(self._passes, key=lambda old: abs(old - number))]
                self._passes[number] = current
            return current

    def samples(self, step: int) -> tuple[int, ...]:
        """The windows of the step, [global batch]. Those of a microbatch are consecutive."""
        first = step * self._global_batch
        places = (divmod(place, self.windows) for place in range(first, first + self._global_batch))
        return tuple(int(self.pass_of(number).order[index]) for number, index in places)

    def known(self, step: int, since: int) -> tuple[bool, ...]:
        """For each sample of the step, whether one of the steps `since` to `step` - 1 used it."""
        with self._lock:
            known = self._known.get((step, since))
        if known is None:
            known = self._find_known(step, since)
            with self._lock:
                while len(self._known) >= _KEPT_STEPS:
                    del self._known[next(iter(self._known))]
                self._known[step, since] = known
        return known

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
    """Which source each sample comes from. Sources are drawn block by block, in proportion to their
    weights."""

    weights: np.ndarray
    seed: int
    before: list[np.ndarray] = field(default_factory=list)
    """The number of samples of each source before each block."""

    def source_of(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the sample's number within the source."""
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
        # One draw from each of MIX_BLOCK equal strata, so shares are exact to one sample per block.
        places = (np.arange(MIX_BLOCK) + random.random(MIX_BLOCK)) / MIX_BLOCK
        sources = np.searchsorted(np.cumsum(self.weights), places, side="right")
        return random.permutation(np.minimum(sources, len(self.weights) - 1))
