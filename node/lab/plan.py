"""What a profile comes to: runs in order, and the cells of each. Pure.

Starting a run costs 10 to 60 seconds, so cells that differ in nothing but the links share a run: the links
change between its phases. Runs come in the order in which the profile names them, so that a time limit cuts
off what it puts last.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from node.config.schema import RunConfig, Window
from node.lab.profile import Profile
from node.lab.profile_file import vary
from node.lab.shape import Shape


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


@dataclass(frozen=True, kw_only=True)
class Cell:
    key: CellKey
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run: its config, and the shapes it goes through."""

    name: str
    """What it is, in a word for files and lines."""
    config: RunConfig
    cells: tuple[Cell, ...]

    @property
    def needs_delay(self) -> bool:
        return any(shape.rtt_ms > 0 for shape in self.shapes)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(cell.shape for cell in self.cells)


def plan_runs(profile: Profile, done: Collection[CellKey] = ()) -> tuple[PlannedRun, ...]:
    """Every run that has cells left to measure. A cell that two sweeps name is measured once."""
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
                            if key not in seen:
                                seen.add(key)
                                cells.append(Cell(key=key, shape=shape))
                        if cells:
                            config = vary(profile.config, forward, backward, microbatch, window)
                            runs.append(_run(profile, config, tuple(cells)))
    return tuple(runs)


def all_shapes(runs: Collection[PlannedRun]) -> tuple[Shape, ...]:
    """Each once, in order."""
    return tuple({shape.label: shape for run in runs for shape in run.shapes}.values())


def planned_steps(profile: Profile, cells: int) -> int:
    """Steps that a run of so many cells takes."""
    lab = profile.lab
    unthrottled = lab.warmup_steps + lab.unthrottled_steps if lab.unthrottled_steps else 0
    return unthrottled + cells * (lab.warmup_steps + lab.steps)


def _run(profile: Profile, config: RunConfig, cells: tuple[Cell, ...]) -> PlannedRun:
    key = cells[0].key
    # The lab ends the run after its last measured step: the step that would make a snapshot never comes.
    steps = planned_steps(profile, len(cells)) + 1
    section = replace(config.run, name=profile.lab.name, seed=key.seed, steps=steps, snapshot_every=steps)
    training = replace(config.training, warmup_steps=min(config.training.warmup_steps, steps))
    name = f"{key.forward_codec}-{key.backward_codec}-mb{key.microbatch}-w{key.window}-s{key.seed}"
    return PlannedRun(name=name, config=replace(config, run=section, training=training), cells=cells)
