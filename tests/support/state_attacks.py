"""States that a liar says it has, or hands in, as data; each against the run's real state machine."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.machine_nodes import SimNode, StateLie, chain
from tests.support.machine_world import World

StateOf = Callable[[int, int], int]
STAGES, STEPS, EVERY = 2, 12, 3
MOST_STEPS = 2 * EVERY
"""Committed after a first lie, until the liar is named, where two honest nodes or more hold its layers."""


def _honest(state: int, _: int) -> int:
    return state


def _stale(_: int, step: int) -> int:
    return chain(step - 1)


_BAD: dict[str, StateOf] = {
    "zeros": lambda *_: 0,
    "random": lambda _, step: 7919 * step + 1,
    "stale": _stale,
    "another-model": lambda *_: 424242,
    "scaled": lambda state, _: 2 * state,
}
STATE_LIES: dict[str, tuple[StateOf, StateOf]] = {
    **{name: (bad, bad) for name, bad in _BAD.items()},
    "honest-hash-bad-layer": (_honest, _BAD["random"]),
    "bad-hash-good-layer": (_BAD["random"], _honest),
}
"""By name: the state whose hashes it says, and the one whose layers it hands in."""


@dataclass(frozen=True, kw_only=True)
class StateSeen:
    """What one lie did to a run."""

    rows: int

    reason: str
    ended: bool
    """With all steps done, and the one right state in the last snapshot."""
    lied: bool
    named: bool
    """The liar is shut out, or the run's last line names it."""
    honest_harmed: tuple[str, ...]
    """Honest nodes that were shut out."""
    steps: int
    """Committed between the first lie and the liar's name."""

    @property
    def good(self) -> bool:
        in_time = self.rows == 2 or self.steps <= MOST_STEPS
        return not self.honest_harmed and in_time and (self.named or self.ended)


def attack_state(lie: str, rows: int, *, audits: bool, seed: int) -> StateSeen:
    """One run with a liar among its hosts, newcomers and deaths at times that the seed says."""
    rng = random.Random(f"{lie} {rows} {audits} {seed}")
    world = World(
        stages=STAGES,
        min_stages=STAGES,
        total_steps=STEPS,
        snapshot_every=EVERY,
        groups=4,
        most_rows=rows,
        follows=rng.random() < 0.7,
        audit_rate=0.5 if audits else 0.0,
    )
    for _ in range(STAGES * rows):
        world.add_node()
    liar = rng.choice(world.nodes)
    said, given = STATE_LIES[lie]
    lies_from = rng.choice([EVERY, 2 * EVERY])
    told: list[int] = []

    def noted(state_of: StateOf) -> StateOf:
        def lying(state: int, step: int) -> int:
            # Alone at its stage nobody contradicts it: see `test_machine_states.py` for what is found then.
            if step < lies_from or liar.epoch is None or len(liar.epoch.placement.rows) < 2:
                return state
            if state_of is not _honest:
                told.append(len(world.disk.commits))
            return state_of(state, step)

        return lying

    liar.state_lie = StateLie(lies_from, noted(said), noted(given))
    world.tick(0.5)
    named_at = -1
    for _ in range(400):
        world.run(rng.randrange(1, 40), rng)
        world.tick(rng.choice([0.5, 0.5, 1.5]))
        machine = world.machine
        if machine is not None and liar.node_id in machine.quarantined and named_at < 0:
            named_at = len(world.disk.commits)
        if world.stopped is not None:
            break
        if rng.random() < 0.03 and len(world.nodes) < STAGES * rows + 3:
            world.add_node()
        if rng.random() < 0.05 and (victim := _may_die(world, liar, rng)) is not None:
            victim.die()
            if rng.random() < 0.5:
                victim.start()
    stop = world.stopped or world.settle()
    machine = world.machine
    assert machine is not None
    if liar.node_id in machine.quarantined and named_at < 0:
        named_at = len(world.disk.commits)
    ended = max(world.disk.snapshots, default=0) == STEPS and not stop.failed
    return StateSeen(
        rows=rows,
        reason=stop.reason,
        ended=ended,
        lied=bool(told),
        named=liar.node_id in machine.quarantined or liar.node_id in stop.reason,
        honest_harmed=tuple(node for node in machine.quarantined if node != liar.node_id),
        steps=named_at - told[0] if told and named_at >= 0 else -1,
    )


def _may_die(world: World, liar: SimNode, rng: random.Random) -> SimNode | None:
    """A node whose death leaves two honest ones at the liar's stage, or one at another."""
    node = rng.choice(world.nodes)
    if not node.alive or node is liar or node.stage < 0:
        return None
    others = [
        one
        for one in world.nodes
        if one.alive and one not in (node, liar) and one.stage == node.stage and one.epoch is not None
    ]
    return node if len(others) >= (2 if node.stage == liar.stage else 1) else None
