"""Codecs that the coordinator plans change with an epoch, go on record first, and a replay has the same."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.coordinator.decisions import (
    record_plan,
    recorded_codecs,
)
from node.coordinator.store import Store
from node.run_state.actions import Action, RecordPlacement, RecordPlan, Released, Send
from node.run_state.codec_control import CodecControl
from node.run_state.epoch import Committed
from node.run_state.run_plan import Past
from node.schedule.floor import LinkRate
from node.tuning.codec_plan import CodecPlan, Lines, PackingTimes, of_gradients
from node.tuning.decisions import WATCHED, StepHistory
from node.tuning.window_plan import StepMeasures
from tests.support.examples import examples
from tests.support.machine_driver import Driver, of_kind, restore_of, sent
from wire.codecs.formats import codec_format, ladder
from wire.errors import UserError
from wire.messages import Begin, Restore
from wire.telemetry import CodecTime

RUNGS = ladder(2)
SHAPE = (1, 1024, 768)
FIRST = "trellis-4.41"


def same(codec: str, boundaries: int) -> CodecPlan:
    return CodecPlan(activations=(codec,) * boundaries, gradients=(of_gradients(codec),) * boundaries)


def control(history: StepHistory[CodecPlan], newest: int) -> CodecControl:
    return CodecControl(RUNGS, lambda count: same(FIRST, count), lambda stages: stages - 1, history, newest)


def lines(*mbit: float) -> Lines:
    """A stage more than lines, each of which computes for 0.2 s a microbatch."""
    stages = len(mbit) + 1
    measures = StepMeasures(
        forward=(0.07,) * stages,
        backward=(0.13,) * stages,
        activation_bytes=0.0,
        gradient_bytes=0.0,
        links=tuple(LinkRate(up=rate * 1e6 / 8, down=rate * 1e6 / 8, latency=0.0) for rate in mbit),
    )
    return Lines(measures=measures, chunks=1, shape=SHAPE, windows=(8,) * len(mbit))


def steps(run: Driver, count: int, found: Lines, seconds: float = 0.3) -> list[Action]:
    """Run steps that are measured; what they led to. An epoch that ends on the way is followed by another."""
    actions: list[Action] = []
    for _ in range(count):
        run.all_vote()
        assert run.machine.epoch is not None
        # The measurement of a step comes while the next one runs, as in a real run.
        run.machine.codecs.measured(run.epoch, found, seconds)
        step = run.epoch.step + 1
        done = run.all_applied()
        actions += done
        if of_kind(done, RecordPlacement):
            actions += run.all_placed(step)
            actions += run.all_ready()
    return actions


def recorded(actions: Sequence[Action]) -> list[tuple[int, CodecPlan]]:
    return [(one.step, one.plan) for one in of_kind(actions, RecordPlan)]


def plan_of(restore: Restore) -> CodecPlan:
    return CodecPlan(activations=restore.activation_codecs, gradients=restore.gradient_codecs)


def test_codecs_change_only_with_an_epoch_and_are_on_record_before_a_node_receives_them() -> None:
    run = Driver(stages=3, steps=100, every=200, codecs=control)
    run.join("abc")
    actions = run.all_placed()
    assert recorded(actions) == [(0, same(FIRST, 2))] and isinstance(actions[0], RecordPlan)
    assert plan_of(restore_of(actions)) == same(FIRST, 2)
    run.all_ready()
    actions = steps(run, 3 * WATCHED, lines(1000, 6))
    changes = recorded(actions)
    assert changes and changes[0][1].activations[1] == RUNGS[0] and changes[0][1].activations[0] != FIRST
    # As many epochs as plans, each with one plan for all its nodes; a step's message has none.
    placements, restores = (
        of_kind(actions, RecordPlacement),
        [m for m in sent(actions) if isinstance(m, Restore)],
    )
    assert len(placements) == len(changes) == len(set(restores))
    assert [plan_of(one) for one in dict.fromkeys(restores)] == [plan for _, plan in changes]
    for record in of_kind(actions, RecordPlan):
        first = next(
            place
            for place, one in enumerate(actions)
            if isinstance(one, Send)
            and isinstance(one.message, Restore)
            and (one.message.step, plan_of(one.message)) == (record.step, record.plan)
        )
        assert actions.index(record) < first
    assert not any(
        vars(message).keys() & {"activation_codecs"}
        for message in sent(actions)
        if isinstance(message, Begin)
    )


def test_a_replay_has_the_recorded_codecs_whatever_is_measured_then() -> None:
    """The run goes back to a snapshot from before a change; then its lines are as fast as can be."""
    run = Driver(stages=3, steps=100, every=200, codecs=control)
    run.join("abc")
    history = recorded(run.all_placed())
    run.all_ready()
    history += recorded(steps(run, 30, lines(6, 6)))
    (_, first), (change, second), *_ = history
    past = Past(
        last_epoch=9,
        newest_snapshot=change - 3,
        committed=Committed(step=29, clip_coefficient=1.0, lr=0.1),
        hosts=("a", "b", "c"),
        codecs=StepHistory(tuple(history)),
    )
    again = Driver(stages=3, steps=100, every=200, codecs=control, past=past)
    again.join("abc")
    actions = again.all_placed()
    assert plan_of(restore_of(actions)) == first and recorded(actions) == []
    again.all_ready()
    used = {}
    for _ in range(30 - (change - 3)):
        step = again.epoch.step
        assert again.epoch.codecs is not None
        used[step] = again.epoch.codecs
        assert recorded(steps(again, 1, lines(math.inf, math.inf), 0.001)) == []
    assert used == {step: StepHistory(tuple(history)).at(step) for step in used}
    assert used[change - 1] == first and used[change] == second
    # From the first step that is new, what is measured counts again.
    found = recorded(steps(again, 3 * WATCHED, lines(math.inf, math.inf), 0.001))
    assert found and found[0][0] >= 30 and found[0][1].activations[1] != second.activations[1]


BIG = st.sampled_from((0.0, 1e-12, 1.0, 1e9))
"""What a node may say of a time, in seconds."""


@settings(max_examples=examples(12))
@given(BIG, BIG, BIG, st.sampled_from((1e-6, 1.0, 100.0, math.inf)))
def test_no_measurement_of_a_volunteer_takes_bits_of_other_links_or_a_place(
    compute: float, trellis: float, fixed: float, mbit: float
) -> None:
    """Stage 1 of four says what it likes of its compute, packing and lines; steps take as long as ever."""
    honest = lines(100, 100, 100)
    times = (("trellis-4.41", trellis), ("dither-4.41", trellis), ("fixed-8", fixed))
    said = PackingTimes(tuple(CodecTime(codec=codec, pack=took, unpack=took) for codec, took in times))
    rate = LinkRate(up=mbit * 1e6 / 8, down=mbit * 1e6 / 8, latency=0.0)
    forward = (honest.measures.forward[0], compute, *honest.measures.forward[2:])
    found = replace(
        honest,
        measures=replace(honest.measures, forward=forward, links=(rate, rate, honest.measures.links[2])),
        packing=(PackingTimes(), said, PackingTimes(), PackingTimes()),
    )
    plans = []
    for told in (honest, found):
        run = Driver(stages=4, steps=100, every=200, codecs=control)
        run.join("abcd")
        run.all_placed()
        run.all_ready()
        actions = steps(run, 3 * WATCHED, told, 0.2)
        assert of_kind(actions, Released) == [] and run.epoch.hosts == tuple("abcd")
        assert run.epoch.step == 3 * WATCHED, "every step was committed"
        assert len(recorded(actions)) <= 3
        assert run.epoch.codecs is not None
        plans.append(run.epoch.codecs)
    for names in zip(*((one.activations[2], one.gradients[2]) for one in plans), strict=True):
        fair, there = (codec_format(name).precision for name in names)
        assert there >= fair


def test_with_other_stages_the_run_begins_with_other_codecs() -> None:
    run = Driver(stages=3, min_stages=2, steps=100, every=200, codecs=control)
    run.join("abc")
    run.all_placed()
    run.all_ready()
    steps(run, 2 * WATCHED, lines(1000, 6))
    run.die("c")
    run.tick(60.0)
    assert len(run.epoch.hosts) == 2
    actions = run.all_placed()
    assert recorded(actions) == [(0, same(FIRST, 1))]
    assert run.machine.codecs.history.changes == ((0, same(FIRST, 1)),)


def test_plans_are_in_the_database_and_a_new_one_replaces_later_ones(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", run_id="r", config_json="{}", pin=b"", now=0.0) as store:
        assert recorded_codecs(store) == StepHistory()
        one, two, three = (same(codec, 2) for codec in ("trellis-3", "trellis-4", "trellis-5"))
        for step, plan in ((0, one), (10, two), (20, three)):
            record_plan(store, RecordPlan(step=step, plan=plan))
    with Store.open(tmp_path / "run") as store:
        assert recorded_codecs(store) == StepHistory(((0, one), (10, two), (20, three)))
        record_plan(store, RecordPlan(step=10, plan=three))
        assert recorded_codecs(store) == StepHistory(((0, one), (10, three)))
        with store.writing() as db:
            db.execute('UPDATE decisions SET decision = \'{"activations": ["nothing"]}\' WHERE at = 10')
        with pytest.raises(UserError, match="a recorded plan of codecs cannot be read"):
            recorded_codecs(store)


def test_a_slow_row_sets_the_rates_of_all() -> None:
    from node.coordinator.planners import slowest

    fast, slow = lines(1000, 1000).measures, lines(1000, 6).measures
    mixed = slowest([replace(fast, forward=(0.07, 0.5, 0.07)), slow])
    assert mixed.forward == (0.07, 0.5, 0.07) and mixed.links == slow.links
