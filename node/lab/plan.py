"""Plan a profile: its runs in order, and the cells of each. Has no side effects.

Starting a run takes 10 to 60 seconds, so cells that differ only in their links share a run, and the links
change between its phases. Runs are in the profile's order, so a time limit cuts off the last ones.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from node.config.schema import RunConfig, Window
from node.lab.profile import Profile, vary
from node.lab.shape import Shape
from wire.errors import ConfigError

SPARE_STEPS = 20
"""Spare steps per change of the links, for steps that run meanwhile: half a second of steps of 25 ms."""


@dataclass(frozen=True, kw_only=True)
class CellKey:
    """Names a cell within a profile's results."""

    forward_codec: str
    backward_codec: str
    microbatch: int
    window: Window
    seed: int
    shape: str
    """`Shape.label`."""

    @property
    def pair(self) -> str:
        """The codecs as profiles name them."""
        return f"{self.forward_codec}/{self.backward_codec}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    key: CellKey
    shape: Shape
    steps: int


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run: its config, and the shapes that it goes through."""

    name: str
    """Used in file names and messages."""
    config: RunConfig
    cells: tuple[Cell, ...]
    spare_steps: int = 0

    @property
    def needs_delay(self) -> bool:
        return any(shape.rtt_ms > 0 for shape in self.shapes)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(cell.shape for cell in self.cells)


def plan_runs(
    profile: Profile, done: Collection[CellKey] = (), only: Sequence[str] = ()
) -> tuple[PlannedRun, ...]:
    """Every run with cells left to measure. A cell that is in two sweeps is measured once.

    A run begins with the cells that have the most bytes in flight (rate times round trip).

    Args:
        done: The cells that have been measured.
        only: The cells to plan, each as `CODECS`, `@SHAPE` or `CODECS@SHAPE`. Empty means all.

    Raises ConfigError if one of `only` names no cell of the profile.
    """
    check_only(profile, only)
    runs: list[PlannedRun] = []
    seen = set(done)
    for seed in profile.lab.seeds:
        for sweep in profile.sweeps:
            for microbatch in sweep.microbatches:
                for window in sweep.windows:
                    for forward, backward in sweep.codecs:
                        cells = []
                        for shape in sweep.shapes:
                            key = CellKey(
                                forward_codec=forward,
                                backward_codec=backward,
                                microbatch=microbatch,
                                window=window,
                                seed=seed,
                                shape=shape.label,
                            )
                            if key not in seen and _wanted(key, only):
                                seen.add(key)
                                cells.append(Cell(key=key, shape=shape, steps=sweep.steps))
                        # TCP adapts to a slower link at once, but takes tens of seconds to fill a faster one.
                        cells.sort(key=lambda cell: -cell.shape.most_on_the_way)
                        if cells:
                            config = vary(profile.config, forward, backward, microbatch, window)
                            runs.append(_run(profile, config, tuple(cells)))
    return tuple(runs)


def all_shapes(runs: Collection[PlannedRun]) -> tuple[Shape, ...]:
    """All shapes without repetition, in order."""
    return tuple({shape.label: shape for run in runs for shape in run.shapes}.values())


def planned_steps(profile: Profile, cells: Collection[Cell]) -> int:
    lab = profile.lab
    unthrottled = lab.warmup_steps + lab.unthrottled_steps if lab.unthrottled_steps else 0
    return unthrottled + sum(lab.warmup_steps + cell.steps for cell in cells)


def spare_steps(profile: Profile, cells: Collection[Cell]) -> int:
    """The spare steps of such a run.

    There are none for a single phase: its loss matters, and the schedule ends with the steps.
    """
    phases = len(cells) + (profile.lab.unthrottled_steps > 0)
    return SPARE_STEPS * phases if phases > 1 else 0


def check_only(profile: Profile, only: Sequence[str]) -> None:
    """Raise ConfigError for the first of `only` that names no cell of the profile."""
    pairs = {"/".join(pair): None for sweep in profile.sweeps for pair in sweep.codecs}
    shapes = {shape.label: None for sweep in profile.sweeps for shape in sweep.shapes}
    for words in only:
        pair, at, shape = words.partition("@")
        if (pair and pair not in pairs) or (at and shape not in shapes) or not words.strip("@"):
            raise ConfigError(
                f"--only {words!r} names no cell of this profile: expected CODECS, @SHAPE or CODECS@SHAPE, "
                f"with codecs of {', '.join(pairs)} and shapes of {', '.join(shapes)}"
            )


def _wanted(key: CellKey, only: Sequence[str]) -> bool:
    def fits(words: str) -> bool:
        pair, at, shape = words.partition("@")
        return pair in ("", key.pair) and (not at or shape == key.shape)

    return not only or any(map(fits, only))


def _run(profile: Profile, config: RunConfig, cells: tuple[Cell, ...]) -> PlannedRun:
    key = cells[0].key
    # The lab ends the run after its last measured step, before the step that would write a snapshot.
    spare = spare_steps(profile, cells)
    steps = planned_steps(profile, cells) + spare + 1
    section = replace(config.run, name=profile.lab.name, seed=key.seed, steps=steps, snapshot_every=steps)
    training = replace(config.training, warmup_steps=min(config.training.warmup_steps, steps))
    name = f"{key.forward_codec}-{key.backward_codec}-mb{key.microbatch}-w{key.window}-s{key.seed}"
    config = replace(config, run=section, training=training)
    return PlannedRun(name=name, config=config, cells=cells, spare_steps=spare)
