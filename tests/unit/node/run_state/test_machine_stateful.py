"""The run's state machine in a world where everything fails (`tests/support/machine_world.py` asserts).

Whatever happens, in whatever order:

1. Every stage of an epoch has one owner in each row, a node that is there, not quarantined and not leaving.
2. Epoch numbers only grow, also over a coordinator's death.
3. A step is committed only after every stage of its epoch voted for it, in order, without a gap, and with the
   one right outcome; a replay records the same again. Every gradient group counts once at every stage, and
   the outcome is the same with any number of rows.
4. A node applies a step only with the clip coefficient and the rate on record, only if it voted for it, once,
   and on the state of that step. No node holds a state that the commits on record do not lead to.
5. When a step begins, and when an epoch is restored, all stages hold the same state.
6. A step counts as done only when every stage has applied it.
7. A snapshot's layers are all of the state of its step.
8. What is on record stays: placements, commits and snapshots survive any death of the coordinator, also one
   between two actions of the same event.
9. Actions of one event, snapshots asked for and members are bounded.
10. A node that follows the run holds the run's state after every step that it is told of.
11. When faults end and nodes come, the run ends in a bounded number of events: with all steps done and the
    one right state in the last snapshot, or, if the step itself is not finite, with the line that says so.
"""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from node.run_state.epoch import Phase
from tests.support.examples import examples
from tests.support.machine_nodes import SimNode, chain
from tests.support.machine_world import World
from wire.messages import FailureKind

MOST_NODES = 8
INDEX = st.integers(0, 999)


class RunWorld(RuleBasedStateMachine):
    world: World

    @initialize(
        stages=st.integers(1, 4),
        least=st.integers(1, 4),
        steps=st.integers(1, 30),
        every=st.integers(1, 4),
        nodes=st.integers(-1, 3),
        poisoned=st.none() | st.none() | st.none() | st.integers(0, 20),
        always=st.booleans(),
        groups=st.sampled_from([1, 1, 2, 4]),
        rows=st.integers(1, 3),
        follows=st.booleans(),
        group_seconds=st.sampled_from([0.0, 3.0]),
    )
    def begin(
        self,
        stages: int,
        least: int,
        steps: int,
        every: int,
        nodes: int,
        poisoned: int | None,
        always: bool,
        groups: int,
        rows: int,
        follows: bool,
        group_seconds: float,
    ) -> None:
        self.world = World(
            stages=stages,
            min_stages=min(least, stages),
            total_steps=steps,
            snapshot_every=every,
            poisoned_step=poisoned,
            poisoned_always=always,
            groups=groups,
            most_rows=min(groups, rows),
            follows=follows,
            group_seconds=group_seconds,
        )
        for _ in range(min(MOST_NODES, max(1, stages * min(groups, rows) + nodes))):
            self.world.add_node()

    def pick(self, which: int) -> SimNode:
        return self.world.nodes[which % len(self.world.nodes)]

    # ---- the world goes on

    @rule(count=st.integers(1, 60), seed=st.integers(0, 2**32))
    def run(self, count: int, seed: int) -> None:
        self.world.run(count, random.Random(seed))

    @rule(seconds=st.sampled_from([0.5, 0.5, 0.5, 1.5, 11.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(
        heal=st.booleans(),
        phase=st.sampled_from(Phase),
        count=st.integers(0, 12),
        seed=st.integers(0, 2**32),
    )
    def run_into(self, heal: bool, phase: Phase, count: int, seed: int) -> None:
        """So that what comes next comes in this phase."""
        rng = random.Random(seed)
        if heal:
            self.resume()
            self.world.heal()
        self.world.run_until(phase, rng)
        self.world.run(count, rng)

    # ---- faults

    @rule(which=INDEX)
    def kill(self, which: int) -> None:
        if (node := self.pick(which)).alive:
            node.die()

    @rule(
        which=INDEX,
        phase=st.sampled_from([Phase.PLACING, Phase.RESTORING]),
        returns=st.booleans(),
        count=st.integers(0, 6),
        seed=st.integers(0, 2**32),
    )
    def kill_before_the_first_step(
        self, which: int, phase: Phase, returns: bool, count: int, seed: int
    ) -> None:
        """A host dies while nodes take their seats or load their state, and may come back at once."""
        rng = random.Random(seed)
        self.world.run_until(phase, rng)
        self.world.run(count, rng)
        epoch = self.world.machine.epoch if self.world.machine is not None else None
        if epoch is None or epoch.phase not in (Phase.PLACING, Phase.RESTORING):
            return
        host = epoch.hosts[which % len(epoch.hosts)]
        node = next(node for node in self.world.nodes if node.node_id == host)
        node.die()
        if returns:
            node.start()
        self.world.run(count, rng)
        self.world.tick(1.5)

    @rule(which=INDEX)
    def give_up(self, which: int) -> None:
        if (node := self.pick(which)).running:
            node.give_up()

    @rule(which=INDEX)
    def start_again(self, which: int) -> None:
        """As a new process; the old one may still be there."""
        node = self.pick(which)
        if node.farewell is None or node.farewell.failed:
            node.die()
            node.start()

    @precondition(lambda self: sum(node.farewell is None for node in self.world.nodes) < MOST_NODES)
    @rule()
    def join(self) -> None:
        self.world.add_node()

    @rule(which=INDEX)
    def freeze_or_thaw(self, which: int) -> None:
        node = self.pick(which)
        node.frozen = not node.frozen

    @precondition(lambda self: self.world.sessions)
    @rule(which=INDEX)
    def cut(self, which: int) -> None:
        self.world.sessions[which % len(self.world.sessions)].broken = True

    @precondition(lambda self: self.world.sessions)
    @rule(which=INDEX)
    def stall_or_not(self, which: int) -> None:
        session = self.world.sessions[which % len(self.world.sessions)]
        session.stalled = not session.stalled

    @rule(which=INDEX, other=INDEX)
    def suspect(self, which: int, other: int) -> None:
        """One says that it does not hear another: it is true, or a lie."""
        if (node := self.pick(which)).running:
            node.suspect(self.pick(other))

    @rule(which=INDEX)
    def leave(self, which: int) -> None:
        if (node := self.pick(which)).running:
            node.leave()

    @precondition(lambda self: self.world.may_fail())
    @rule(which=INDEX, kind=st.sampled_from([FailureKind.LINK, FailureKind.INTERNAL, FailureKind.PEER]))
    def fail(self, which: int, kind: FailureKind) -> None:
        node = self.pick(which)
        if node.running and node.epoch is not None and node.epoch.failure is None:
            self.world.failures += 1
            peer = (node.stage + 1) % node.stages if kind is FailureKind.PEER and node.stages > 1 else -1
            node.fail(kind, peer)

    @precondition(lambda self: self.world.machine is not None)
    @rule(after=st.integers(0, 6))
    def kill_the_coordinator(self, after: int) -> None:
        """Between two actions, soon."""
        self.world.crash_after = after

    @precondition(lambda self: self.world.machine is None)
    @rule()
    def start_the_coordinator(self) -> None:
        self.world.start_coordinator()

    @precondition(lambda self: self.world.machine is not None and self.world.stopped is None)
    @rule(at_once=st.booleans())
    def stop(self, at_once: bool) -> None:
        self.world.happen(lambda machine: machine.stop("asked", at_once=at_once))

    def resume(self) -> None:
        """As `thinwire resume` does after a stop; its nodes have gone."""
        world = self.world
        unfinished = max(world.disk.snapshots, default=0) < world.plan.total_steps
        if unfinished and world.stopped is not None and world.stopped.reason == "asked":
            world.crash_coordinator()

    # ---- what holds

    @invariant()
    def nodes_hold_what_is_on_record(self) -> None:
        self.world.check_nodes()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.stopped is not None and world.stopped.reason == "asked":
            world.crash_coordinator()
        total = world.plan.total_steps
        if max(world.disk.snapshots, default=0) < total:
            end = world.settle()
            if end.reason == "asked":
                # It was asked to stop and had not yet come to it: `resume` goes on from what it saved.
                assert not end.failed
                world.crash_coordinator()
                if max(world.disk.snapshots, default=0) == total:
                    return
                end = world.settle()
            poisoned = world.poisoned_step is not None and world.poisoned_step < total
            assert end.failed is poisoned, end.reason
            if poisoned:
                cause = "the run diverges" if world.poisoned_always else "the codecs are the cause"
                assert cause in end.reason
                assert len(world.disk.commits) == world.poisoned_step
                return
            assert end.reason == "all steps are done"
        assert max(world.disk.snapshots) == total == len(world.disk.commits)
        for node in world.nodes:
            assert node.state_step < 0 or node.state == chain(node.state_step)


RunWorld.TestCase.settings = settings(
    max_examples=examples(100),
    stateful_step_count=80,
    suppress_health_check=list(HealthCheck),
)
TestRunWorld = RunWorld.TestCase
