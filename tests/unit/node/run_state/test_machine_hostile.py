"""Members that say anything at any time, about any row, stage and step: the state machine takes it.

What these lies cost is tested elsewhere (`test_machine_liars.py`). An exception would end the coordinator.
"""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from node.run_state.machine import RunMachine
from node.telemetry.clock import WAITS, TimeKind
from tests.support.examples import examples
from tests.support.machine_driver import units_of
from tests.support.machine_nodes import layers_of
from tests.support.machine_world import World
from wire.messages import (
    AwaitedSums,
    FailureKind,
    HandedOver,
    NodeMessage,
    PeerSilent,
    StateHashes,
    StepFailed,
    SumsMissing,
    Validated,
)
from wire.telemetry import Telemetry

KINDS = ("", "another", TimeKind.FORWARD, *WAITS)
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
    liar = rng.choice(world.nodes)
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
        for node_id in world.open:
            awaited = AwaitedSums(rng.randint(-1, rows), rng.random() < 0.5) if rng.random() < 0.5 else None
            assert world.machine is not None
            world.machine.heard(node_id, world.now, rng.choice(KINDS), awaited=awaited)
        world.tick(rng.choice(PAUSES) if rng.random() < 0.3 else 0.5)
        victim = rng.choice(world.nodes)
        if victim.alive and rng.random() < 0.05:
            victim.die()
        elif not victim.alive and (victim.farewell is None or victim.farewell.failed):
            victim.start()
