"""With two spares any one member may lie, from any step on: the run still ends with the right state."""

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.run_state.machine import RunMachine
from node.telemetry.clock import WAITS, TimeKind
from tests.support.cases import each
from tests.support.examples import examples
from tests.support.machine_driver import units_of
from tests.support.machine_nodes import SimEpoch, SimNode, chain, layers_of
from tests.support.machine_world import World
from wire.messages import (
    Applied,
    AwaitedSums,
    FailureKind,
    Following,
    HandedOver,
    Leave,
    NodeMessage,
    PeerSilent,
    Placed,
    Ready,
    StateHashes,
    StepFailed,
    SumsMissing,
    UnitHash,
    Validated,
    Vote,
)
from wire.telemetry import Telemetry

STAGES, STEPS, EVERY = 3, 14, 2
Lie = Callable[["Liar", Vote], list[NodeMessage]]


class Liar(SimNode):
    """Lies in its votes from a step on. It computes as all others do, so that its state is right."""

    def __init__(self, world: World, lie: Lie, first: int, layers: str) -> None:
        """`layers`: what it does about them, a key of `LIES` or nothing."""
        super().__init__("liar", world)
        self.lie, self.first, self.layers = lie, first, layers

    def write(self) -> None:
        message = self.outbox.popleft()
        lies = isinstance(message, Vote) and message.step >= self.first
        said = self.lie(self, message) if isinstance(message, Vote) and lies else [message]
        assert self.session is not None
        self.session.to_coordinator.extend(said)

    def _upload(self, epoch: SimEpoch, step: int) -> None:
        if step < self.first or self.layers not in LAYERS:
            super()._upload(epoch, step)
        elif self.layers == "wrong layers":
            self.world.happen(
                lambda machine: machine.layer_refused(self.node_id, step, "no layer", self.world.now)
            )
            # As a node does whose layer is refused; the coordinator knows of it before.
            self.fail(FailureKind.INTERNAL)


def failed(liar: SimNode, vote: Vote, kind: FailureKind, peer: int = -1) -> list[NodeMessage]:
    return [StepFailed(epoch=vote.epoch, step=vote.step, kind=kind, message="a lie", peer_stage=peer)]


def other_side(liar: SimNode) -> int:
    return liar.stage - 1 if liar.stage else 1


def accuses_all(liar: SimNode, vote: Vote) -> list[NodeMessage]:
    places = [
        (kind, stage) for kind in (FailureKind.PEER, FailureKind.LINK) for stage in range(-1, STAGES + 1)
    ]
    return [said for kind, stage in places for said in failed(liar, vote, kind, stage)]


def false_state(liar: SimNode, vote: Vote) -> list[NodeMessage]:
    """In the middle of a step: another place, and other states of steps before and after."""
    other = UnitHash("0" * 64, 1.0, 1.0, 1.0)
    states = [
        StateHashes(epoch=vote.epoch, step=step, units=dict.fromkeys(vote.norms, other))
        for step in range(max(0, vote.step - EVERY), vote.step + EVERY)
    ]
    held = Placed(epoch=vote.epoch, held_step=vote.step + 3, voted=True, lineage=vote.epoch + 7)
    return [held, Ready(epoch=vote.epoch, telemetry=Telemetry()), *states, vote]


LIES: dict[str, Lie] = {
    "nan": lambda liar, vote: [replace(vote, norms=dict.fromkeys(vote.norms, math.nan))],
    "infinite loss": lambda liar, vote: [replace(vote, loss=math.inf if vote.loss is not None else None)],
    "huge norm": lambda liar, vote: [replace(vote, norms={unit: 1e60 for unit in vote.norms})],
    "overflowing norm": lambda liar, vote: [replace(vote, norms=dict.fromkeys(vote.norms, 1.7e308))],
    "negative norm": lambda liar, vote: [replace(vote, norms=dict.fromkeys(vote.norms, -1.0))],
    "negative loss": lambda liar, vote: [replace(vote, loss=-1e300)],
    "foreign unit": lambda liar, vote: [replace(vote, norms={**vote.norms, (liar.stage * 2 + 3) % 6: 1.0})],
    "withheld": lambda liar, vote: [],
    "not finite": lambda liar, vote: failed(liar, vote, FailureKind.NON_FINITE),
    "internal": lambda liar, vote: failed(liar, vote, FailureKind.INTERNAL),
    "complaint": lambda liar, vote: failed(liar, vote, FailureKind.PEER, other_side(liar)),
    "broken link": lambda liar, vote: failed(liar, vote, FailureKind.LINK, other_side(liar)),
    "leaves": lambda liar, vote: [vote, Leave(reason="it says so")],
    "ends": lambda liar, vote: [Leave(reason="it says so", failed=True)],
    "repeated": lambda liar, vote: [vote] * 5,
    "of the next step": lambda liar, vote: [replace(vote, step=vote.step + 1), vote],
    "of other work": lambda liar, vote: [replace(vote, generation=vote.generation + 1)],
    "sums of one row": lambda liar, vote: [replace(vote, sums=dict.fromkeys(vote.norms, bytes(16)))],
    "groups of one row": lambda liar, vote: [replace(vote, group_losses={0: 1.0})],
    "accuses all": accuses_all,
    "failed in no step": lambda liar, vote: [
        replace(failed(liar, vote, FailureKind.INTERNAL)[0], step=step) for step in (-(2**60), 2**60)
    ],
    "hears nobody": lambda liar, vote: [
        *(PeerSilent(epoch=vote.epoch, stage=stage, replica=0) for stage in range(-1, STAGES + 1)),
        vote,
    ],
    "lacks sums": lambda liar, vote: [
        *(SumsMissing(epoch=vote.epoch, step=vote.step, replica=row) for row in (-1, 0, 1)),
        vote,
    ],
    "handed over": lambda liar, vote: [
        HandedOver(epoch=vote.epoch, step=vote.step, generation=0, groups=(0,), passed_on=(0,))
    ],
    "false state": false_state,
    "measured": lambda liar, vote: [
        Validated(epoch=vote.epoch, step=vote.step, number=0, loss=-1.0, telemetry=Telemetry()),
        vote,
    ],
    "no layers": lambda liar, vote: [vote],
    "wrong layers": lambda liar, vote: [vote],
}
LAYERS = ("no layers", "wrong layers")


def settled(
    lie: Lie, stage: int, first: int, layers: str, rng: random.Random | None = None
) -> tuple[World, SimNode]:
    """A run with one liar, from its beginning to its end. `rng` draws the order of events."""
    world = World(stages=STAGES, min_stages=STAGES, total_steps=STEPS, snapshot_every=EVERY)
    for place in range(STAGES + 2):
        if place != stage:
            world.add_node()
            continue
        world.nodes.append(Liar(world, lie, first, layers))
    for turn in range(20_000):
        if world.stopped is not None:
            return world, world.nodes[stage]
        if events := world.possible():
            (events[turn % len(events)] if rng is None else rng.choice(events))()
        else:
            world.tick(1.0)
        world.check_nodes()
        # Whoever ends and is not shut out is started again, as volunteers' machines do.
        for node in world.nodes:
            gone = not node.alive and world.stopped is None and world.machine is not None
            if gone and node.node_id not in world.machine.quarantined:
                node.start()
    raise AssertionError("the run does not end")


def check(world: World, liar: SimNode) -> None:
    """The run has ended at its last step with the right state, and no honest member is shut out."""
    assert world.stopped is not None
    assert (world.stopped.reason, world.stopped.failed) == ("all steps are done", False)
    assert STEPS in world.disk.snapshots
    assert world.disk.commits.keys() == set(range(STEPS))
    assert all(node.state == chain(STEPS) for node in world.nodes if node.alive and node.state_step == STEPS)
    assert world.machine is not None
    assert world.machine.quarantined.keys() <= {liar.node_id}
    assert len(world.disk.hosts) == STAGES


@pytest.mark.parametrize("lie", LIES)
@each("first", [0, 1, 9, STEPS - 1])
@each("stage", range(STAGES))
def test_one_liar_ends_no_run_and_gets_no_honest_member_shut_out(lie: str, stage: int, first: int) -> None:
    check(*settled(LIES[lie], stage, first, lie))


@given(
    lies=st.lists(st.sampled_from(sorted(LIES.keys() - {*LAYERS})), min_size=1, max_size=3),
    place=st.integers(0, STAGES + 1),
    first=st.integers(0, STEPS - 1),
    share=st.sampled_from([0.3, 0.7, 1.0]),
    layers=st.sampled_from(("", *LAYERS)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(100), deadline=None)
def test_any_lies_from_any_step_on_in_any_order(
    lies: list[str], place: int, first: int, share: float, layers: str, seed: int
) -> None:
    """Lies of several kinds, by turns and now and then, of a member that may begin as a spare."""
    rng, draws = random.Random(seed), random.Random(seed)

    def mixed(liar: Liar, vote: Vote) -> list[NodeMessage]:
        return LIES[draws.choice(lies)](liar, vote) if draws.random() < share else [vote]

    check(*settled(mixed, place, first, layers, rng))


# ---- members that say anything at any time, about any row, stage and step: the state machine takes it


class Boaster(SimNode):
    """It may be told to do what it only said that it could."""

    def work(self) -> None:
        with contextlib.suppress(AssertionError):
            super().work()


KINDS = ("", "another", TimeKind.FORWARD, *sorted(WAITS))
PAUSES = (0.5, 1.5, 11.0, 35.0)


def anything(world: World, rng: random.Random) -> NodeMessage:
    assert world.machine is not None
    epoch = world.machine.epoch or world.machine._epochs.ended
    assert epoch is not None
    number, step = epoch.number + rng.choice([0, 0, 0, -1, 1]), epoch.step + rng.choice([0, 0, 0, -1, 1, 9])
    row, stage = rng.randint(-1, epoch.rows), rng.randint(-1, epoch.stages)
    groups = tuple(rng.sample(range(-1, world.plan.groups + 1), rng.randint(0, 2)))
    messages: list[Callable[[], NodeMessage]] = [
        lambda: StepFailed(
            epoch=number,
            step=step,
            kind=rng.choice([*FailureKind]),
            message="anything",
            peer_stage=stage,
            peer_replica=row,
        ),
        lambda: PeerSilent(epoch=number, stage=stage, replica=row),
        lambda: SumsMissing(epoch=number, step=step, replica=row),
        lambda: HandedOver(
            epoch=number,
            step=step,
            generation=rng.randint(0, 9),
            group_losses=dict.fromkeys(groups, 1e300),
            passed_on=groups,
        ),
        lambda: HandedOver(
            epoch=number,
            step=step,
            generation=rng.randint(0, 9),
            groups=tuple(sorted({*groups} - {-1})),
        ),
        lambda: Ready(epoch=number, telemetry=Telemetry()),
        lambda: Applied(epoch=number, step=step, telemetry=Telemetry()),
        lambda: Placed(
            epoch=number, held_step=step, voted=rng.random() < 0.5, lineage=rng.randint(0, epoch.number)
        ),
        lambda: Following(
            snapshot=rng.choice([0, 5, 10]), step=step, failed=rng.choice(["", "", "it says so"])
        ),
        lambda: Leave(reason="it says so", failed=rng.random() < 0.5),
        lambda: StateHashes(
            epoch=number,
            step=step,
            units=layers_of(rng.choice([0, 5]), units_of(epoch.stages)[stage % epoch.stages]),
        ),
        lambda: Validated(epoch=number, step=step, number=0, loss=1e300, telemetry=Telemetry()),
    ]
    return rng.choice(messages)()


@pytest.mark.parametrize("seed", range(examples(36)))
def test_the_state_machine_takes_whatever_members_say(seed: int) -> None:
    rng = random.Random(seed)
    all_lie = seed % 2 == 1  # about what they wait for
    rows = rng.randint(1, 4)
    world = World(
        stages=rng.randint(1, 3),
        total_steps=30,
        snapshot_every=rng.choice([5, 50]),
        groups=rows * rng.randint(1, 3),
        most_rows=rows,
        follows=rng.random() < 0.8,
        audit_rate=rng.choice([0.0, 0.5]),
    )
    for _ in range(world.plan.stages * rows + 1):
        world.add_node()
    place = rng.randrange(len(world.nodes))
    liar = world.nodes[place] = Boaster(world.nodes[place].node_id, world)
    world.liars.add(liar.node_id)
    world.most_actions = math.inf  # many nodes may be late at once
    world.tick(0.5)
    for _ in range(300):
        world.run(rng.randint(1, 30), rng)
        if world.stopped is not None:
            break
        liar.frozen = rng.random() < 0.5
        if world.disk.last_epoch and rng.random() < 0.1:
            message = anything(world, rng)
            world.happen(partial(RunMachine.message, node_id=liar.node_id, message=message, now=world.now))
        for node_id in world.open if all_lie else world.open.keys() & {liar.node_id}:
            awaited = AwaitedSums(rng.randint(-1, rows), rng.random() < 0.5) if rng.random() < 0.5 else None
            assert world.machine is not None
            world.machine.heard(node_id, world.now, rng.choice(KINDS), awaited=awaited)
        world.tick(rng.choice(PAUSES) if rng.random() < 0.3 else 0.5)
        victim = rng.choice(world.nodes)
        if victim.alive and rng.random() < 0.05:
            victim.die()
        elif not victim.alive and (victim.farewell is None or victim.farewell.failed):
            victim.start()
    assert world.machine is not None
    shut_out = world.machine.quarantined.items()
    # Time passes so fast that nodes may be too late with layers.
    honest = {node for node, why in shut_out if node != liar.node_id and "hand in its layers" not in why}
    assert all_lie or not honest
