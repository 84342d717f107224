"""States that liars say they have, hand in or vote for, as data; each against the real state machine."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.machine_driver import UNITS
from tests.support.machine_nodes import SimNode, StateLie, chain
from tests.support.machine_world import World

StateOf = Callable[[int, int], int]
STAGES, STEPS, EVERY = 2, 12, 3
MOST_STEPS = 2 * EVERY
"""Committed after a first lie, until a liar is named, where more honest nodes than liars hold its layers."""


def _honest(state: int, _: int) -> int:
    return state


def _random(_: int, step: int) -> int:
    return 7919 * step + 1


def _always(_: int) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Lie:
    """What liars do; the rest they do as everyone."""

    said: StateOf = _honest
    """The state whose hashes they say."""
    given: StateOf = _honest
    """That whose layers they hand in."""
    voted: StateOf = _honest
    """That whose gradient norms they vote."""
    at: Callable[[int], bool] = _always
    """At which steps."""
    liars: int = 1
    """Nodes of one stage that say the same."""
    is_newcomer: bool = False
    """It joins later, and lies at once."""
    ends: bool = False
    """It ends as soon as it has handed in a layer, and starts again."""
    restarts: bool = False
    """The coordinator starts again, perhaps in the midst of a snapshot."""


def _both(state_of: StateOf) -> Lie:
    return Lie(said=state_of, given=state_of)


STATE_LIES: dict[str, Lie] = {
    "zeros": _both(lambda *_: 0),
    "random": _both(_random),
    "stale": _both(lambda _, step: chain(step - 1)),
    "another-model": _both(lambda *_: 424242),
    "scaled": _both(lambda state, _: 2 * state),
    "honest-hash-bad-layer": Lie(given=_random),
    "bad-hash-good-layer": Lie(said=_random),
    "norms": Lie(voted=_random),
    "norms-and-hashes": Lie(said=_random, given=_random, voted=_random),
    "norms-at-snapshots": Lie(voted=_random, at=lambda step: step % EVERY == 0),
    "every-third-snapshot": Lie(said=_random, given=_random, at=lambda step: step % (3 * EVERY) == 0),
    "at-the-end": Lie(said=_random, given=_random, at=lambda step: step == STEPS),
    "layers-at-the-end": Lie(given=_random, at=lambda step: step == STEPS),
    "two-collude": Lie(said=_random, given=_random, liars=2),
    "two-collude-in-norms": Lie(voted=_random, liars=2),
    "newcomer": Lie(said=_random, given=_random, is_newcomer=True),
    "newcomer-norms": Lie(voted=_random, is_newcomer=True),
    "ends-after-its-upload": Lie(said=_random, given=_random, ends=True),
    "layers-and-ends": Lie(given=_random, ends=True),
    "while-resuming": Lie(said=_random, given=_random, restarts=True),
    "norms-while-resuming": Lie(voted=_random, restarts=True),
}

NAMES = (
    "shut out",
    "no stage any more",
    "is not taken",
    "was not that of",
    "is wrong",
    "was wrong",
    "without",
)
"""In lines that name who lies."""


@dataclass(frozen=True, kw_only=True)
class StateSeen:
    """What one lie did to a run."""

    in_minority: bool
    """More honest nodes than liars held the layers at every lie, and the coordinator never restarted."""
    reason: str
    ended: bool
    """With all steps done, and the one right state in the last snapshot."""
    lied: bool
    named: bool
    """Liars are shut out, or lines for the operator name them, alone or with those that they contradict."""
    honest_harmed: tuple[str, ...]
    """Honest nodes that were shut out."""
    steps: int
    """Committed between the first lie and the first liar's name; -1 without either."""

    @property
    def good(self) -> bool:
        in_time = not self.in_minority or self.steps <= MOST_STEPS
        return not self.honest_harmed and in_time and (self.named or self.ended)


class _Attack:
    def __init__(self, lie: Lie, world: World, rng: random.Random, lies_from: int) -> None:
        self.lie, self.world, self.rng = lie, world, rng
        self.lies_from = 0 if lie.is_newcomer else lies_from
        self.liars: list[SimNode] = []
        self.lied_at = self.named_at = -1
        self.in_minority = True
        self._read = 0

    def add(self, node: SimNode) -> None:
        self.liars.append(node)
        lie = self.lie
        node.state_lie = StateLie(
            said=self._of(node, lie.said), given=self._of(node, lie.given), voted=self._of(node, lie.voted)
        )

    def _of(self, node: SimNode, state_of: StateOf) -> StateOf:
        def lying(state: int, step: int) -> int:
            if state_of is _honest or step < self.lies_from or not self.lie.at(step):
                return state
            # Where no honest node contradicts them: see `test_machine_states.py` for what is found then.
            judges = self._judges(node)
            liars = sum(one.node_id in judges for one in self.liars)
            if len(judges) < 2 or 2 * liars > len(judges):
                return state
            self.in_minority &= 2 * liars < len(judges)
            if self.lied_at < 0:
                self.lied_at = len(self.world.disk.commits)
            return state_of(state, step)

        return lying

    def _judges(self, node: SimNode) -> set[str]:
        """Who holds this node's layers, without newcomers if two do that are none."""
        machine = self.world.machine
        if node.epoch is None or machine is None or machine.epoch is None:
            return set()
        # Who has just had its seat was not asked for its state.
        column = {*machine.epoch.column(node.stage)} - machine.epoch.fresh
        older = column - machine.epoch.newcomers
        return older if len(older) > 1 else column

    def look(self) -> None:
        """Whether a liar is named by now."""
        machine, names = self.world.machine, {one.node_id for one in self.liars}
        notes, self._read = self.world.notes[self._read :], len(self.world.notes)
        if self.lied_at < 0 or self.named_at >= 0 or machine is None:
            return
        told = [note for note in notes if any(what in note for what in NAMES)]
        if self.world.stopped is not None:
            told.append(self.world.stopped.reason)
        words = {word.strip(".,:;()") for note in told for word in note.split()}
        if names & (words | machine.quarantined.keys()):
            self.named_at = len(self.world.disk.commits)

    def happen(self) -> None:
        """What befalls the run now, by chance."""
        world, rng, lie = self.world, self.rng, self.lie
        if rng.random() < 0.03 and len(world.nodes) < world.plan.most_rows * STAGES + 3:
            world.add_node()
        if rng.random() < 0.05 and (victim := self._may_die()) is not None:
            victim.die()
            if rng.random() < 0.5:
                victim.start()
        if lie.is_newcomer and not self.liars and rng.random() < 0.2:
            self.add(world.add_node())
        if lie.restarts and rng.random() < 0.05:
            self.in_minority = False  # what was said before is forgotten
            world.crash_coordinator()
            world.start_coordinator()
        for liar in self.liars if lie.ends else ():
            gave = [one for one in liar.uploads.values() if len(one.units) < len(UNITS) // STAGES]
            if liar.alive and gave:
                liar.die()
                liar.start()

    def _may_die(self) -> SimNode | None:
        """A node whose death leaves more honest nodes than liars at their stage, or one at another."""
        world = self.world
        node = self.rng.choice(world.nodes)
        if not node.alive or node in self.liars or node.stage < 0:
            return None
        alike = [
            one for one in world.nodes if one.alive and one.stage == node.stage and one.epoch is not None
        ]
        liars = sum(one in self.liars for one in alike)
        least = liars + 1 if liars else 1
        return node if len(alike) - liars - 1 >= least else None


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
    run = _Attack(STATE_LIES[lie], world, rng, rng.choice([EVERY, 2 * EVERY]))
    world.tick(0.5)
    if not run.lie.is_newcomer:
        first = rng.randrange(STAGES * rows)
        for number in range(min(run.lie.liars, rows // 2)):
            run.add(world.nodes[(first + STAGES * number) % (STAGES * rows)])
    for _ in range(400):
        world.run(rng.randrange(1, 40), rng)
        world.tick(rng.choice([0.5, 0.5, 1.5]))
        run.look()
        if world.stopped is not None:
            break
        run.happen()
    stop = world.stopped or world.settle()
    run.look()
    machine = world.machine
    assert machine is not None
    liars = {one.node_id for one in run.liars}
    return StateSeen(
        in_minority=run.in_minority,
        reason=stop.reason,
        ended=max(world.disk.snapshots, default=0) == STEPS and not stop.failed,
        lied=run.lied_at >= 0,
        named=run.named_at >= 0,
        honest_harmed=tuple(node for node in machine.quarantined if node not in liars),
        steps=run.named_at - run.lied_at if run.named_at >= 0 else -1,
    )
