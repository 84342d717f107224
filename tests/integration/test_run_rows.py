"""Rows of real processes: the same losses and weights with one row and with two, whoever dies, and when."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import LoraSection, RunConfig, SyncSection
from node.telemetry.events import (
    Event,
    Notice,
    PlacementMade,
    SeatFilled,
    SeatLost,
    SnapshotStored,
    StepAborted,
    StepDone,
)
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import KILLED, FaultRun, held, small, until_joined
from tests.support.faults import Fault, Kind, Phase

CONFIG = replace(
    small(steps=10, snapshot_every=5),
    pipeline=replace(small().pipeline, stages=2, groups=4, sync_codec="fixed-8", window=0, replicas="auto"),
)
ALONE = ((0, 1, 2, 3),)
BOTH = ((0, 1), (2, 3))

pytestmark = pytest.mark.timeout(240)


HOLD = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=0)


def grids(run: FaultRun) -> list[tuple[tuple[int, ...], ...]]:
    """The groups of each row, of every placement."""
    return [placed.groups for placed in run.all(PlacementMade)]


def assert_one_row_goes_on(
    prefork: Prefork, tmp_path: Path, config: RunConfig, phase: Phase, *, step: int
) -> None:
    """Of two rows one loses a node in `step`; the other takes its groups, and no step runs again."""
    kill = Fault(kind=Kind.KILL, phase=phase, stage=1, step=step)
    with FaultRun(tmp_path, config, [HOLD, kill], launch=prefork.popen) as run:
        with held(run, HOLD):
            run.start()
            run.add_nodes(4)
            assert run.tend(until=until_joined(4)) is None
        run.assert_ends_undisturbed()
        (lost,) = run.all(SeatLost)
        assert lost.stage == 1 and lost.step - 1 in (step, step + 1)
        assert not [aborted for aborted in run.all(StepAborted) if not aborted.is_planned]


ADAPTED_MIXTURE = replace(
    CONFIG,
    run=replace(CONFIG.run, steps=5),
    model=replace(
        CONFIG.model,
        layers=2,
        family="mixture",
        experts=4,
        experts_per_token=2,
        qk_norm="head",
        balance_loss=0.1,
    ),
    lora=LoraSection(rank=2, base="4"),
    pipeline=replace(CONFIG.pipeline, sequence_chunks=2),
)
"""Adapters on experts in 4 bits, by samples in slices."""
BY_MUON = replace(CONFIG, training=replace(CONFIG.training, optimizer="muon"))


@pytest.mark.parametrize(
    ("phase", "config"),
    [(Phase.FORWARD, ADAPTED_MIXTURE), (Phase.COMMIT_APPLY, BY_MUON)],
    ids=["forward-mixture", "commit-apply-muon"],
)
def test_a_row_that_loses_a_node_costs_its_groups_work(
    phase: Phase, config: RunConfig, prefork: Prefork, tmp_path: Path
) -> None:
    """The other row takes its groups at once, and from where it is."""
    assert_one_row_goes_on(prefork, tmp_path, config, phase, step=2)


LONG = replace(CONFIG, run=replace(CONFIG.run, steps=30, snapshot_every=30))


def a_step_is_done(event: Event) -> bool:
    return isinstance(event, StepDone)


def five_steps_are_done(event: Event) -> bool:
    return isinstance(event, StepDone) and event.step >= 5


def a_seat_is_filled(event: Event) -> bool:
    return isinstance(event, SeatFilled)


def slow_steps(first: int, end: int) -> list[Fault]:
    """Steps in which a node has time to open its links: others are quicker than those of any real run."""
    return [
        Fault(kind=Kind.DELAY, phase=Phase.SENDING, stage=0, step=step, seconds=0.5)
        for step in range(first, end)
    ]


def the_state_is_here(event: Event) -> bool:
    return isinstance(event, Notice) and "the state is here" in event.text


def test_a_node_that_is_started_again_is_back_in_its_row_before_the_next_snapshot(
    prefork: Prefork, tmp_path: Path
) -> None:
    early, later = replace(HOLD, step=6), replace(HOLD, step=12)
    kill = Fault(kind=Kind.KILL, phase=Phase.BACKWARD, stage=1, step=2)
    slow = slow_steps(13, 28)
    with FaultRun(tmp_path, LONG, [HOLD, early, later, kill, *slow], launch=prefork.popen) as run:
        with held(run, later):
            with held(run, early):
                with held(run, HOLD):
                    run.start()
                    run.add_nodes(4)
                    assert run.tend(until=until_joined(4)) is None
                # Where steps are slow it would else be back before the next one is done.
                assert run.tend(until=five_steps_are_done, restart=False) is None
                run.add_node(state_dir=run.state_dirs[run.killed[0]])
                assert run.tend(until=until_joined(1)) is None
            assert run.tend(until=the_state_is_here) is None
        assert run.tend(until=a_seat_is_filled) is None
        run.plan.haste.touch()
        run.assert_ends_undisturbed()
        assert [len(rows) for rows in grids(run)][-1:] == [2], "the epoch goes on"
        (lost,), (filled,) = run.all(SeatLost), run.all(SeatFilled)
        assert (filled.row, filled.stage, filled.node_id) == (lost.row, lost.stage, lost.node_id)
        assert lost.step < filled.step < 30


def test_two_rows_that_have_lost_a_node_make_one_within_the_step(prefork: Prefork, tmp_path: Path) -> None:
    first = Fault(kind=Kind.KILL, phase=Phase.BACKWARD, stage=1, step=2)
    # Rows that are broken compute nothing, so that this is another row's.
    second = Fault(kind=Kind.KILL, phase=Phase.FORWARD, stage=0, step=4)
    with FaultRun(tmp_path, LONG, [HOLD, first, second, *slow_steps(5, 17)], launch=prefork.popen) as run:
        with held(run, HOLD):
            run.start()
            run.add_nodes(6)
            assert run.tend(until=until_joined(6)) is None
        assert run.tend(until=a_seat_is_filled, restart=False) is None
        run.plan.haste.touch()
        run.assert_ends_undisturbed()
        assert not [aborted for aborted in run.all(StepAborted) if not aborted.is_planned]
        one, other, moved = run.all(SeatLost)[:3]
        filled = run.all(SeatFilled)[0]
        assert moved.node_id == filled.node_id, "a node of one broken row makes the other one whole"
        assert {(lost.row, lost.stage) for lost in (one, other)} >= {(filled.row, filled.stage)}
        # Steps of the third row go on meanwhile, as they are short.
        assert filled.step >= other.step


def test_a_node_that_dies_while_others_load_their_state_costs_its_seat(
    prefork: Prefork, tmp_path: Path
) -> None:
    """All processes of a run are killed, and load its snapshot as they are back. One node dies in that, and
    the other row begins the steps without it."""
    crash = Fault(kind=Kind.COORDINATOR_KILL, phase=Phase.VOTING, step=7)
    kill = Fault(kind=Kind.KILL, phase=Phase.STATE_FETCH, stage=1, step=5)
    config = replace(CONFIG, run=replace(CONFIG.run, steps=20))
    # However late one of them is back, the others wait for it.
    config = replace(config, coordinator=replace(config.coordinator, regroup_seconds=60.0))
    with FaultRun(
        tmp_path, config, [crash, kill], gather=4, snapshot_first=True, launch=prefork.popen
    ) as run:
        run.start()
        nodes = run.add_nodes(4)
        assert run.tend(restart=False) == KILLED
        for node in nodes:
            node.kill()
        run.resume()
        run.assert_ends_undisturbed()
        at = max(run.times(kill))
        _, lost = run.after(at, SeatLost)
        _, placed = run.after(at, PlacementMade)
        assert placed.epoch == lost.epoch and placed.resume_step == 5, "the epoch goes on without it"
        assert placed.nodes.count("") == 1 and not placed.nodes[2 * lost.row + lost.stage]
        assert [aborted for aborted in run.all(StepAborted) if not aborted.is_planned] == []


def two_join_in_a_step(run: FaultRun, hold: Fault) -> None:
    """A run of one row begins, and two more nodes come while a step is held."""
    with held(run, hold):
        run.start()
        run.add_nodes(2)
        assert run.tend(until=a_step_is_done) is None
        run.add_spare()
        run.add_spare()
        assert run.tend(until=until_joined(2)) is None


def test_a_newcomer_that_dies_as_it_follows_costs_the_run_nothing(prefork: Prefork, tmp_path: Path) -> None:
    """Nobody waits for it. It is started again, and follows the run again."""
    early, later = replace(HOLD, step=3), replace(HOLD, step=12)
    # Nobody fetches a state before: the run begins from its seed.
    kill = Fault(kind=Kind.KILL, phase=Phase.STATE_FETCH, stage=1)
    with FaultRun(tmp_path, LONG, [early, later, kill], launch=prefork.popen) as run:
        with held(run, later):
            two_join_in_a_step(run, early)
            assert run.tend(until=until_joined(1)) is None
        run.assert_ends_undisturbed()
        assert all(aborted.is_planned for aborted in run.all(StepAborted))
        assert grids(run) in ([ALONE], [ALONE, BOTH]), "the other one is back in time, or is not"


ROUNDS = replace(
    CONFIG,
    run=replace(CONFIG.run, steps=6, snapshot_every=3),
    training=replace(CONFIG.training, global_batch=16, microbatch=2),
    sync=SyncSection(every=2, warmup=2, codec="fixed-4", outer_lr=0.6, outer_momentum=0.9),
)


def test_a_row_that_loses_a_node_in_a_round_changes_no_bit(prefork: Prefork, tmp_path: Path) -> None:
    """The other row goes on from where the round began, and takes the local steps of all groups."""
    assert_one_row_goes_on(prefork, tmp_path, ROUNDS, Phase.SYNC, step=3)


def test_a_run_whose_nodes_all_die_in_a_round_goes_on_from_a_snapshot_with_the_outer_momentum(
    prefork: Prefork, tmp_path: Path
) -> None:
    kills = [Fault(kind=Kind.KILL, phase=Phase.LOCAL_STEP, stage=stage, step=4) for stage in (0, 1)]
    with FaultRun(tmp_path, ROUNDS, kills, launch=prefork.popen) as run:
        run.start()
        run.add_nodes(2)
        run.assert_ends_undisturbed()
        assert [stored.step for stored in run.all(SnapshotStored)] == [3, 6]


def test_a_row_enters_while_rounds_go_on(prefork: Prefork, tmp_path: Path) -> None:
    """Two nodes come to a run of one row: they follow its rounds, by the summed changes, from a snapshot that
    nobody waits for."""
    config = replace(ROUNDS, run=replace(ROUNDS.run, steps=24, snapshot_every=24))
    early, later = replace(HOLD, step=3), replace(HOLD, step=10)
    with FaultRun(tmp_path, config, [early, later], launch=prefork.popen) as run:
        with held(run, later):
            two_join_in_a_step(run, early)
            assert run.tend(until=the_state_is_here) is None
        run.assert_ends_undisturbed()
        assert grids(run) == [ALONE, BOTH]
        first, last = (stored.step for stored in run.all(SnapshotStored))
        filled = run.all(SeatFilled)
        assert sorted((seat.row, seat.stage) for seat in filled) == [(1, 0), (1, 1)]
        assert all(first + 1 < seat.step <= last for seat in filled), "after a step that followed it"
