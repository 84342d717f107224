"""Nodes die and come within a step: others compute what their rows were to, and no bit changes."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import cache
from queue import SimpleQueue
from typing import Any

import pytest
from torch import Tensor

from node.config.schema import RunConfig
from node.data.samples import part_of
from node.model.labels import BatchPart, from_bytes, to_bytes
from node.run_state.grid import StepGroups
from node.run_state.handed_over import HandedGroups
from node.schedule.gradient_groups import RowShare, group_of, microbatches_of
from node.stage.executor import StageExecutor
from node.stage.inbox import StepChange, StepInterrupted
from tests.support.memory_pipeline import MemoryPipeline, corpus
from tests.unit.node.stage.test_gradient_sync import CONFIG, ROWS, changed
from wire.messages import HandedOver, Vote
from wire.spec import Direction, TensorKey

STAGES = CONFIG.pipeline.stages
SECONDS = 30.0


class DeadError(Exception):
    """The node has died."""


class Deaths:
    """A step of a `MemoryPipeline` in which nodes die and come, with the coordinator's part of it."""

    def __init__(
        self,
        stages: MemoryPipeline,
        rows: list[tuple[int, ...]],
        comes: Mapping[int, Future[None]] = {},
        *,
        follows: int | None = None,
        waiting: tuple[int, ...] = (),
        keeps: bool = False,
        from_death: bool = False,
    ) -> None:
        """
        Args:
            comes: by place, row after row, when a node takes the seat, which is empty until then. Groups that
                its row had been placed with wait for it, and one of each other row.
            follows: a place whose node dies, and that another node has before anyone hears of the death.
            waiting: groups that no row has until then.
            keeps: rows keep what they have handed over.
            from_death: they begin to hand over at the first change of the step.
        """
        self.from_death = from_death
        self.keeps, self.handed, self.said = keeps, HandedGroups(), SimpleQueue[tuple[int, HandedOver]]()
        self.losses: dict[int, float] = {}
        """From nodes that are gone, by group."""
        self.on_death: Callable[[], None] = lambda: None
        self.heard: Callable[[], None] = lambda: None
        """Called, like `on_death`, by the thread that plays the coordinator."""
        self.stages, self.rows, self.comes, self.follows = stages, rows, dict(comes), follows
        self.dead: set[int] = {*comes}
        """Places, row after row."""
        self.audited: dict[int, tuple[int, ...]] = {}
        """By row, groups of another that it computes to check them, until a death ends the comparison."""
        self.late: list[int] = []
        self.generation = 0
        held = {row: tuple(group for group in rows[row] if group not in waiting) for row in self.whole()}
        self.shared = StepGroups(held, 0.0)
        self.shared.waiting += waiting
        self.told = {place: self.shared.of(place // STAGES) for place in range(len(stages.executors))}
        """By place, its row's groups when its node heard of them last."""
        if comes:
            self.shared.hold_back(dict.fromkeys(self.whole(), 2.0))
            self.shared.waiting += [group for place in comes for group in rows[place // STAGES]]
        self.votes: dict[int, Vote] = {}
        self.sums: dict[int, dict[str, bytes]] = {}
        """What each node has kept of the step for newcomers, once it heard of a death."""
        self.running: dict[Future[Vote], int] = {}
        self.shares = [RowShare(stages.config, row, rows) for row in range(len(rows))]
        self._data = corpus(stages.config)

    def whole(self) -> list[int]:
        broken = {place // STAGES for place in self.dead}
        return [row for row in range(len(self.rows)) if row not in broken]

    def samples(self, place: int, groups: tuple[int, ...]) -> dict[BatchPart, dict[int, object]]:
        config, found = self.stages.config, {}
        size = config.training.microbatch
        for part in self.stages.executors[place].needs:
            rows = part_of(self._data, self.stages.step, part)
            batch = from_bytes(part, to_bytes(part, rows), *rows.shape)
            numbers = {group: microbatches_of(config, [group]) for group in groups}
            found[part] = {g: batch[of.start * size : of.stop * size] for g, of in numbers.items()}
        return found

    def change(self, place: int) -> StepChange:
        row, stage = divmod(place, STAGES)
        absent, late = (
            [one // STAGES for one in places if one % STAGES == stage] for places in (self.dead, self.late)
        )
        waiting = [(len(self.rows), tuple(self.shared.waiting))] if self.shared.waiting else []
        work = self.shares[row].work([*self.shared.runs, *waiting], absent, late)
        has_lost = not set(self.told[place]).issubset(work.groups)
        self.told[place] = work.groups
        samples = self.samples(place, work.groups)
        sums = self.sums.setdefault(place, {})

        def keep(step: int, unit: str, parts: Sequence[Tensor]) -> None:
            assert step == self.stages.step and unit not in sums
            sums[unit] = b"".join(part.numpy().tobytes() for part in parts)

        return StepChange(
            generation=self.generation,
            work=work,
            samples=samples,
            keep=keep,
            hand_over=(lambda message: self.said.put((place, message))) if self.keeps else None,
            has_lost=has_lost,
        )

    def die(self, place: int) -> None:
        """It is gone: its row's groups go to rows that are whole, and all others hear of it."""
        self.dead.add(place)
        self.late = [one for one in self.late if one != place]
        self.votes.pop(place, None)
        self._work_lost(place)
        if place == self.follows:
            self.follows = None
            self.stages.another_node(place, self.shares[place // STAGES])
            self.told[place] = ()
            self._seat(place)
        else:
            self._give()
        self.on_death()

    def hear(self) -> None:
        """Take what nodes have said so far."""
        while not self.said.empty():
            place, message = self.said.get()
            self.handed.said(str(place), place % STAGES, message)

    def kept(self, place: int) -> set[int]:
        """The groups that its row keeps without a node."""
        row, stage = divmod(place, STAGES)
        if self.handed.keeps(row, stage):
            return set()
        mates = {*range(row * STAGES, (row + 1) * STAGES)} - self.dead - {place}
        return self.handed.kept_without(str(place), map(str, mates), self.shared.of(row))

    def _work_lost(self, place: int) -> None:
        self.hear()
        row, stage = divmod(place, STAGES)
        kept = self.kept(place)
        for other in {*self.handed.at_risk(str(place), stage, self.shared.of)} - {row}:
            self.handed.lose(other)
            self.shared.lose(other)
        column = [str(other) for other in range(stage, len(self.told), STAGES)]
        self.losses.update(self.handed.node_lost(str(place), stage, column, self.generation + 1))
        self.shared.lose(row, kept)
        if kept:
            self.handed.keep(row, stage)
        else:
            self.handed.lose(row)

    def come(self, place: int) -> None:
        """A node that holds the state has an empty seat."""
        del self.comes[place]
        self._seat(place)

    def _seat(self, place: int) -> None:
        self.dead.remove(place)
        self.late.append(place)
        self._give()
        change = self.change(place)
        self.running[self.stages.submit(lambda: self._step(place, change))] = place

    def _give(self) -> None:
        self.generation += 1
        if not self.comes:
            # Rows this fast wait for nothing.
            self.shared.give(dict.fromkeys(self.whole(), 0.001), 0.0)
        for other in set(range(len(self.stages.executors))) - self.dead:
            if other not in self.running.values() and other not in self.votes:
                continue  # it is about to begin
            if other in self.running.values():
                self.stages.inboxes[other].announce(self.change(other))
            else:
                self.more(other)

    def more(self, place: int) -> None:
        executor, change = self.stages.executors[place], self.change(place)
        self.running[self.stages.submit(lambda: executor.vote(change))] = place

    def run(self) -> list[Vote]:
        for place in set(range(len(self.stages.executors))) - self.dead:
            change = self.change(place) if self.dead or self.shared.waiting else None
            self.running[self.stages.submit(lambda place=place, of=change: self._step(place, of))] = place
        coming = {future: place for place, future in self.comes.items()}
        self.running.update(coming)  # type: ignore[arg-type]
        ends = time.monotonic() + 60
        while self.running:
            done, _ = wait(self.running, return_when=FIRST_COMPLETED, timeout=0.02 if self.keeps else 60)
            assert done or time.monotonic() < ends, "the step does not end"
            self.hear()
            self.heard()
            for future in done:
                place = self.running.pop(future)
                if future in coming:
                    self.come(place)
                    continue
                if isinstance(future.exception(), DeadError | StepInterrupted):
                    self.die(place)
                    continue
                self.stages.inboxes[place].take_change()
                vote = self.votes[place] = future.result()
                if vote.generation != self.generation:
                    self.more(place)
        return [self.votes[place] for place in sorted(self.votes)]

    def _step(self, place: int, change: StepChange | None) -> Vote:
        executor, row = self.stages.executors[place], place // STAGES
        groups = self.rows[row] if change is None else change.work.groups
        executor.use_windows((), self.audited.get(row, ()), groups)
        said = change.hand_over if change is not None else lambda message: self.said.put((place, message))
        executor.hand_over = said if self.keeps and not (self.from_death and change is None) else None
        executor.wants_digests = bool(self.audited)
        executor.keep_sums = None if change is None else change.keep
        parts = self.samples(place, tuple(range(CONFIG.pipeline.groups)) if change is None else groups)
        whole = {part: numpy_joined(found) for part, found in parts.items() if found}
        return executor.run_step(1, self.stages.step, self.stages.ios[place], whole, change=change)


def numpy_joined(found: dict[int, object]) -> object:
    import numpy as np

    return np.concatenate([found[group] for group in sorted(found)])


def dies(stages: MemoryPipeline, place: int, when: Callable[[TensorKey], bool], skip: int = 0) -> None:
    """The node at a place dies as it sends such a tensor."""
    io, left = stages.ios[place], [skip]
    send, to_row = io.send, io.send_to_row

    def look(key: TensorKey) -> None:
        if when(key):
            left[0] -= 1
            if left[0] == -1:
                # Its other threads end, too.
                stages.inboxes[place].interrupt("dead", DeadError())
                raise DeadError

    def one(key: TensorKey, packed: Tensor, elements: int) -> None:
        look(key)
        send(key, packed, elements)

    def other(row: int, key: TensorKey, *what: Any) -> None:
        look(key)
        to_row(row, key, *what)

    io.send, io.send_to_row = one, other  # type: ignore[method-assign]


def seen(stages: MemoryPipeline, place: int, when: Callable[[TensorKey], bool]) -> Future[None]:
    """Done once the node at a place sends such a tensor."""
    io, found = stages.ios[place], Future[None]()
    send, to_row = io.send, io.send_to_row

    def one(key: TensorKey, packed: Tensor, elements: int) -> None:
        if when(key) and not found.done():
            found.set_result(None)
        send(key, packed, elements)

    def other(row: int, key: TensorKey, *what: Any) -> None:
        if when(key) and not found.done():
            found.set_result(None)
        to_row(row, key, *what)

    io.send, io.send_to_row = one, other  # type: ignore[method-assign]
    return found


def held_up(stages: MemoryPipeline, place: int) -> threading.Event:
    """The node at a place sends nothing along its row before this is set."""
    io, goes_on = stages.ios[place], threading.Event()
    send = io.send

    def late(key: TensorKey, packed: Tensor, elements: int) -> None:
        goes_on.wait(60)
        send(key, packed, elements)

    io.send = late  # type: ignore[method-assign]
    return goes_on


def ended(stages: MemoryPipeline, deaths: Deaths) -> str:
    """The hash of the weights after one step of the survivors, which all are the same."""
    votes = deaths.run()
    votes[-1] = replace(votes[-1], group_losses={**deaths.losses, **votes[-1].group_losses})
    alive = [place for place in range(len(stages.executors)) if place not in deaths.dead]
    executors = [stages.executors[place] for place in alive]
    stages.executors = [*executors]
    stages.commit(votes)
    by_stage: dict[int, list[StageExecutor]] = {}
    for executor in executors:
        by_stage.setdefault(executor.stage, []).append(executor)
    sums = {stages.executors[at].stage: deaths.sums.get(place) for at, place in enumerate(alive)}
    for at, place in enumerate(alive):
        executor = executors[at]
        assert deaths.sums.get(place) == sums[executor.stage], "all have kept the same sums"
        assert {unit: len(data) for unit, data in deaths.sums.get(place, {}).items()} == {
            unit: executor.sum_bytes(unit) for unit in executor.units if deaths.sums
        }
    for column in by_stage.values():
        ours, *others = (executor.copy_state() for executor in column)
        for other in others:
            for unit in ours.units:
                mine, theirs = ours.whole(unit), other.whole(unit)
                assert all(mine[name].equal(theirs[name]) for name in mine)
    stages.executors = [column[0] for _, column in sorted(by_stage.items())]
    stages.rows = 1
    return stages.weights_sha256()


WHEN = {
    "forward": lambda key: key.direction is Direction.ACTIVATION,
    "backward": lambda key: key.direction is Direction.GRADIENT,
    "share": lambda key: key.direction is Direction.SYNC_SHARE,
    "sum": lambda key: key.direction is Direction.SYNC_SUM,
}


@cache
def once(config: RunConfig) -> str:
    """The hash of the weights after a step of one row without deaths, in as many slices.

    On some processors a product of fewer rows has other bits, so the unsplit run is no measure here.
    """
    with MemoryPipeline(config, rows=ROWS[1]) as stages:
        stages.train(1)
        return stages.weights_sha256()


@pytest.mark.parametrize(
    ("rows", "place", "when", "skip"),
    [
        (2, 2, "forward", 0),
        (2, 3, "backward", 2),
        (2, 0, "share", 1),
        (2, 1, "sum", 0),
        (3, 0, "forward", 3),
        (3, 2, "sum", 0),
        (3, 5, "share", 0),
        (4, 7, "sum", 0),
        (4, 4, "forward", 1),
    ],
)
def test_a_death_changes_no_bit(rows: int, place: int, when: str, skip: int) -> None:
    config = changed(pipeline={"sync_codec": "fixed-8"})
    with MemoryPipeline(config, rows=ROWS[rows]) as stages:
        dies(stages, place, WHEN[when], skip)
        deaths = Deaths(stages, ROWS[rows])
        assert ended(stages, deaths) == once(config)
        assert deaths.dead == {place}


@pytest.mark.parametrize(("place", "when"), [(1, "backward"), (1, "share"), (2, "forward"), (2, "share")])
def test_a_death_ends_a_comparison(place: int, when: str) -> None:
    """Two rows check a group of another: one of them gets it as its own, or they lose a node themselves."""
    config = changed(pipeline={"sync_codec": "fixed-8"})
    rows = ROWS[3]
    with MemoryPipeline(config, rows=rows) as stages:
        dies(stages, place, WHEN[when])
        deaths = Deaths(stages, rows)
        deaths.audited = {1: rows[0][:1], 2: rows[0][:1]}
        assert ended(stages, deaths) == once(config)
        assert deaths.dead == {place}
        for other, vote in deaths.votes.items():
            assert vote.digests.keys() == set(deaths.shared.of(other // STAGES))
            assert not [digests for digests in vote.digests.values() if digests.loss is not None]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("rows", "first", "second"), [(3, 1, 2), (3, 4, 3), (4, 6, 1)])
def test_who_took_the_groups_may_die_as_well(rows: int, first: int, second: int, when: str) -> None:
    """In every phase of the passes that it took over."""
    config = changed(pipeline={"sync_codec": "fixed-8"})
    with MemoryPipeline(config, rows=ROWS[rows]) as stages:
        deaths = Deaths(stages, ROWS[rows])
        own = ROWS[rows][second // STAGES]
        passes = WHEN[when]

        def takes(key: TensorKey) -> bool:
            is_pass = key.direction in (Direction.ACTIVATION, Direction.GRADIENT)
            return deaths.generation > 0 and passes(key) and not (is_pass and taken_by(own, key))

        def taken_by(groups: tuple[int, ...], key: TensorKey) -> bool:
            return group_of(config, key.microbatch) in groups

        dies(stages, first, WHEN["forward" if first % STAGES == 0 else "backward"])
        dies(stages, second, takes)
        assert ended(stages, deaths) == once(config)
        assert first in deaths.dead and deaths.generation == len(deaths.dead)


def test_a_stage_that_waits_for_a_gradient_begins_groups_that_it_gets() -> None:
    """Else the pipeline would stay as empty as it is while rows are broken."""
    config, rows = changed(pipeline={"sync_codec": "fixed-8", "window": 4}), ROWS[2]
    more = rows[0][1]
    with MemoryPipeline(config, rows=rows) as stages:
        deaths = Deaths(stages, rows, waiting=(more,))
        first = microbatches_of(config, rows[0][:1])[-1]
        sent = [
            seen(stages, 0, lambda key, number=number: WHEN["forward"](key) and key.microbatch == number)
            for number in (first, microbatches_of(config, [more])[-1])
        ]
        # The other stage of the row computes nothing, so no gradient comes.
        change = deaths.change(0)
        step = stages.submit(lambda: deaths._step(0, change))
        sent[0].result(SECONDS)
        deaths.shared = StepGroups(dict(enumerate(rows)), 0.0)
        deaths.generation = 1
        stages.inboxes[0].announce(deaths.change(0))
        sent[1].result(SECONDS)
        assert not step.done()
        stages.inboxes[0].interrupt("the test is over")
        with pytest.raises(StepInterrupted):
            step.result(SECONDS)


VARIANTS = (
    {"pipeline": {"sync_codec": "fixed-8"}},
    {"pipeline": {"sync_codec": "bf16", "sequence_chunks": 2}},
    {"pipeline": {"sync_codec": "fixed-8"}, "sync": {"every": 2}},
)


@pytest.mark.parametrize("keeps", ["nothing", "all", "from the first death on"])
@pytest.mark.parametrize("seed", range(12))
def test_deaths_at_any_instants_of_a_step_change_no_bit(seed: int, keeps: str) -> None:
    """Up to three nodes, one row of which is left; also of one row, and while others take over its groups."""
    chance = random.Random(seed)
    rows = chance.choice((3, 4))
    config = changed(**VARIANTS[seed % len(VARIANTS)])
    with MemoryPipeline(config, rows=ROWS[rows]) as stages:
        deaths = Deaths(
            stages, ROWS[rows], keeps=keeps != "nothing", from_death=keeps == "from the first death on"
        )
        spared = chance.randrange(rows)
        places = [place for place in range(rows * STAGES) if place // STAGES != spared]
        doomed = chance.sample(places, chance.choice((2, 3)))
        for place in doomed:
            dies(stages, place, chance.choice((*WHEN.values(), lambda key: True)), chance.randrange(4))
        assert ended(stages, deaths) == once(config)
        assert deaths.dead <= set(doomed)


@pytest.mark.parametrize(
    ("rows", "place", "sender", "when"),
    [
        (2, 1, 2, "forward"),
        (2, 0, 3, "backward"),
        (3, 2, 0, "forward"),
        (3, 5, 1, "share"),
        (4, 0, 7, "backward"),
        (4, 7, 0, "share"),
    ],
)
def test_a_row_that_is_whole_again_within_a_step_takes_groups_that_wait(
    rows: int, place: int, sender: int, when: str
) -> None:
    config = changed(pipeline={"sync_codec": "fixed-8"})
    with MemoryPipeline(config, rows=ROWS[rows]) as stages:
        deaths = Deaths(stages, ROWS[rows], {place: seen(stages, sender, WHEN[when])})
        assert ended(stages, deaths) == once(config)
        assert deaths.shared.of(place // STAGES) and not deaths.dead


@pytest.mark.parametrize(
    ("place", "when", "skip"),
    [
        (0, "forward", 0),
        (0, "forward", 1),
        (0, "share", 0),
        (1, "backward", 0),
        (1, "backward", 1),
        (1, "share", 0),
        (1, "share", 3),
    ],
)
@pytest.mark.parametrize("variant", range(3))
def test_a_seat_has_another_node_before_anyone_hears_of_the_death(
    place: int, when: str, skip: int, variant: int
) -> None:
    """The row then has other groups than the ones that it was computing, without a time in which it had
    none."""
    config = changed(**VARIANTS[variant])
    with MemoryPipeline(config, rows=ROWS[2]) as stages:
        dies(stages, place, WHEN[when], skip)
        deaths = Deaths(stages, ROWS[2], follows=place, waiting=(1, 3))
        assert ended(stages, deaths) == once(config)
        assert deaths.shared.of(place // STAGES) and not deaths.dead


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize(
    ("place", "when", "skip"), [(0, "sum", 0), (1, "sum", 0), (0, "share", 2), (1, "share", 4)]
)
def test_another_node_of_a_seat_gets_the_sums_that_the_one_before_had(
    rows: int, place: int, when: str, skip: int
) -> None:
    config = changed(pipeline={"sync_codec": "fixed-8"})
    with MemoryPipeline(config, rows=ROWS[rows]) as stages:
        dies(stages, place, WHEN[when], skip)
        deaths = Deaths(stages, ROWS[rows], follows=place)
        assert ended(stages, deaths) == once(config)
        assert not deaths.dead and deaths.generation == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_node_comes_and_others_die_at_any_instants_of_a_step(seed: int) -> None:
    """Who comes may die, too."""
    chance = random.Random(seed)
    config = changed(**VARIANTS[seed % len(VARIANTS)])
    with MemoryPipeline(config, rows=ROWS[4]) as stages:
        place, doomed = chance.sample(range(2 * STAGES), 2)
        spared = chance.randrange(2, 4) * STAGES
        deaths = Deaths(stages, ROWS[4], {place: seen(stages, spared, WHEN["forward"])})
        for one in (place, doomed) if chance.random() < 0.3 else (doomed,):
            dies(stages, one, chance.choice((*WHEN.values(), lambda key: True)), chance.randrange(4))
        assert ended(stages, deaths) == once(config)


@pytest.mark.parametrize(
    ("doomed", "passes_on", "kept"),
    [
        ((2,), True, {1}),  # the first stage
        ((3,), True, {1}),  # the last one, whose losses count
        ((3, 2), True, {1}),  # two of one row
        ((3, 4), True, {1, 2}),  # two of different stages
        ((2, 4), True, {1, 2}),  # the second had passed on what the first had handed over
        ((2, 4), False, {2}),  # it had not
        ((2, 4, 6), True, {1, 2, 3}),
        ((7, 5, 3), True, {1, 2, 3}),
    ],
)
def test_a_row_that_has_handed_over_its_sums_loses_nothing_with_a_node(
    doomed: tuple[int, ...], passes_on: bool, kept: set[int]
) -> None:
    config = changed(pipeline={"sync_codec": "fixed-8"})
    rows = ROWS[max(3, len(doomed) + 1)]
    with MemoryPipeline(config, rows=rows) as stages:
        deaths = Deaths(stages, rows, keeps=True)
        left, goes_on = [*doomed], held_up(stages, 0)

        def heard() -> None:
            """The next node dies once its stage has handed over all; the first row computes when all have."""
            if not left or len(deaths.dead) + len(left) < len(doomed):
                return
            column = range(left[0] % STAGES, len(stages.executors), STAGES)
            alive = [place for place in column[1:] if place not in deaths.dead]
            at_risk = deaths.handed.at_risk(str(left[0]), left[0] % STAGES, deaths.shared.of)
            if passes_on and {*at_risk} - {left[0] // STAGES}:
                return
            if all({*deaths.shared.of(place // STAGES)} == deaths.kept(place) for place in alive):
                stages.inboxes[left.pop(0)].interrupt("dead", DeadError())

        if not passes_on:
            stages.ios[doomed[1]].take_of_gone = lambda row, key: None  # type: ignore[method-assign]
        deaths.heard = heard
        deaths.on_death = lambda: None if left else goes_on.set()
        assert ended(stages, deaths) == once(config)
        assert deaths.dead == {*doomed}
        broken = {place // STAGES for place in doomed}
        assert {row for row in broken if deaths.shared.of(row) == rows[row]} == kept
        assert deaths.generation == len(doomed)


def test_rows_hand_over_what_they_computed_before_the_first_death_of_the_step() -> None:
    """A second one loses nothing."""
    config, rows = changed(pipeline={"sync_codec": "fixed-8"}), ROWS[3]
    with MemoryPipeline(config, rows=rows) as stages:
        deaths = Deaths(stages, rows, keeps=True, from_death=True)
        goes_on = held_up(stages, 0)
        first, second = STAGES, 2 * STAGES
        last = config.pipeline.groups - 1
        is_done = seen(
            stages, second, lambda key: key.direction is Direction.SYNC_SHARE and key.microbatch >= last
        )

        def heard() -> None:
            if not deaths.dead and is_done.done():
                assert not deaths.kept(second)
                stages.inboxes[first].interrupt("dead", DeadError())
            elif deaths.dead == {first} and {*rows[2]} <= deaths.kept(second):
                stages.inboxes[second].interrupt("dead", DeadError())

        deaths.heard, deaths.on_death = heard, lambda: goes_on.set() if len(deaths.dead) == 2 else None
        assert ended(stages, deaths) == once(config)
        assert deaths.dead == {first, second} and {*rows[2]} <= {*deaths.shared.of(2)}
