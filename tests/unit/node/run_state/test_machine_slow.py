"""Members that answer late in each step, and in time for every deadline; and honest runs that are slow."""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import pytest

from node.run_state.actions import Action, Announce, OpenSnapshot
from node.run_state.epoch import Phase
from node.run_state.failures import MEMORY_STEPS, SLOW_STEPS
from node.run_state.run_plan import Past
from node.run_state.votes import PastStep
from node.telemetry.clock import TimeKind
from tests.support.cases import each
from tests.support.machine_driver import Driver, of_kind
from wire.messages import AwaitedSums

WORK = 0.8
"""Seconds of a step that a node takes to compute its part; a step takes 1."""
Delay = Callable[[int, float], float]
"""Number of the lie, seconds of the median step so far -> seconds by which the liar answers late."""


class PacedRun:
    """A run on an invented clock: nodes answer each phase after so many seconds."""

    def __init__(
        self,
        nodes: str,
        spares: str = "",
        *,
        rows: int = 1,
        past: Past | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self.run = Driver(stages=len(nodes) // rows, every=3, steps=10_000, groups=rows, past=past)
        self.run.rates.update(rates or {})
        self.late: dict[Phase, dict[str, float]] = defaultdict(dict)
        """By phase: seconds that a node adds to its answer."""
        self.work: dict[str, float] = {}
        """Seconds that nodes compute, where that is not `WORK`: all others wait for the slowest."""
        self.network = 0.0
        """Seconds that links add to a step."""
        self.awaited: dict[str, AwaitedSums] = {}
        """What nodes of other rows keep from a node, where it waits for sums."""
        self.actions: list[Action] = []
        self.seconds: list[float] = []
        """Of each step."""
        self._spent: dict[tuple[int, str], dict[str, float]] = {}
        self.run.join(nodes)
        self.run.join(spares)

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.run.epoch.hosts

    def lines(self, node: str) -> list[str]:
        return [one.text for one in of_kind(self.actions, Announce) if one.about == node]

    def steps(self, count: int) -> "PacedRun":
        goal = self.run.epoch.step + count
        while not self.run.machine.stopped and self.run.epoch.step < goal:
            self.phase()
        return self

    def phase(self) -> None:
        """All hosts answer what the phase asks, each in its time; the coordinator may act before all have."""
        epoch, began = self.run.epoch, self.run.time
        at = epoch.number, epoch.step, epoch.phase
        longest = max(self.work.get(node, WORK) for node in epoch.hosts)
        usual = longest + 0.2 + self.network if epoch.phase is Phase.STEPPING else 0.1
        due = sorted((usual + self.late[epoch.phase].get(node, 0.0), node) for node in epoch.hosts)
        for seconds, node in due:
            while self.run.time < began + seconds:
                self.actions += self.run.tick(min(1.0, began + seconds - self.run.time))
                if self._at() != at:
                    return
            self.actions += self._answer(node, epoch.phase, seconds)
            self._store()
            if self._at() != at:
                break
        if at[2] is Phase.STEPPING and self._at() != at:
            self.seconds.append(self.run.time - began)

    def _at(self) -> tuple[int, int, Phase]:
        epoch = self.run.epoch
        return epoch.number, epoch.step, epoch.phase

    def _answer(self, node: str, phase: Phase, seconds: float) -> list[Action]:
        run = self.run
        match phase:
            case Phase.PLACING:
                return run.placed(node, run.epoch.step)
            case Phase.RESTORING:
                return run.ready(node)
            case Phase.APPLYING:
                return run.applied(node)
        spent = self._spent.setdefault((run.epoch.number, node), defaultdict(float))
        work = self.work.get(node, WORK)
        spent[TimeKind.FORWARD] += work / 3
        spent[TimeKind.BACKWARD] += work * 2 / 3
        wait = TimeKind.WAIT_DOWNSTREAM if run.epoch.stage_of(node) == 0 else TimeKind.WAIT_UPSTREAM
        if node in self.awaited:
            wait = TimeKind.SYNC
            run.machine.heard(node, run.time, wait, awaited=self.awaited[node])
        spent[wait] += max(0.0, seconds - work)
        return run.vote(node, times=dict(spent))

    def _store(self) -> None:
        """Each snapshot that is asked for is there at once."""
        stored = max((one.step for one in of_kind(self.actions, OpenSnapshot)), default=0)
        if stored > self.run.machine.newest_snapshot:
            self.actions += self.run.stored(stored)


def lied(paced: PacedRun, liars: str, delay: Delay, phase: Phase, most: int) -> int:
    """Steps until no liar has a stage; `most` if that takes longer."""
    for lies in range(most):
        usual = median(paced.seconds[-9:])
        for liar in liars:
            paced.late[phase][liar] = delay(lies + 1, usual)
        paced.steps(1)
        if not set(liars) & set(paced.hosts):
            return lies + 1
    return most


def at_deadline(_lies: int, usual: float) -> float:
    return 0.93 * max(30.0, 3 * usual)


@dataclass(frozen=True, kw_only=True)
class Lie:
    delay: Delay
    most: int
    """Steps until the liar has lost its stage."""
    nodes: str = "abc"
    liars: str = "b"
    spares: str = "xy"
    rows: int = 1


LIES = {
    "at the deadline": Lie(delay=at_deadline, most=8),
    "three times as long": Lie(delay=lambda *_: 3.0, most=8),
    "every second step": Lie(delay=lambda lies, usual: at_deadline(lies, usual) * (lies % 2), most=12),
    "every fourth step": Lie(delay=lambda lies, usual: at_deadline(lies, usual) * (lies % 4 == 0), most=20),
    "5 % more each step": Lie(delay=lambda lies, _: 1.05**lies - 1, most=40),
    "the first stage": Lie(delay=at_deadline, most=8, liars="a"),
    "two at once": Lie(delay=at_deadline, most=16, nodes="abcd", liars="bc"),
    "two of three": Lie(delay=at_deadline, most=16, liars="bc"),
    "one of two": Lie(delay=at_deadline, most=8, nodes="ab", liars="b"),
    "two rows": Lie(delay=at_deadline, most=8, nodes="abcd", liars="c", rows=2),
    "two rows, no spare": Lie(delay=at_deadline, most=8, nodes="abcd", liars="c", spares="", rows=2),
    "three rows": Lie(delay=at_deadline, most=16, nodes="abcdef", liars="cf", spares="", rows=3),
}


@pytest.mark.parametrize("name", LIES)
def test_who_votes_late_again_and_again_gives_its_stage_to_a_spare(name: str) -> None:
    lie = LIES[name]
    paced = PacedRun(lie.nodes, lie.spares, rows=lie.rows).steps(12)
    assert set(lie.liars) <= set(paced.hosts)
    assert lied(paced, lie.liars, lie.delay, Phase.STEPPING, lie.most + 1) <= lie.most
    found = [" ".join(paced.lines(liar)) for liar in lie.liars]
    assert any("is slow: it holds up each step by" in line for line in found)
    assert all("is slow" in line or "is replaced" in line for line in found)
    assert max(paced.seconds) < 60, "what the liar does makes no deadline longer"
    honest = set(lie.nodes) - set(lie.liars)
    assert not any(paced.lines(node) for node in honest)
    paced.steps(MEMORY_STEPS - 40)
    assert not set(lie.liars) & set(paced.hosts)
    assert max(paced.seconds[-40:]) < 1.1


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_who_votes_in_time_and_sends_late_is_slow_and_not_those_that_wait(rows: int) -> None:
    """The node of stage 1, or of row 1, keeps what one or several others need. At most one of them gives up
    its stage before it does, where it is one node's word against another's."""
    paced = PacedRun("abcdefgh"[: 2 * rows], "wxyz", rows=rows).steps(12)
    liar = paced.hosts[1 if rows == 1 else 2]
    for _ in range(6 * SLOW_STEPS):
        epoch = paced.run.epoch
        if not epoch.has(liar):
            break
        kept = [epoch.row(0)[0]] if rows == 1 else epoch.column(0)
        paced.late[Phase.STEPPING] = {node: 3.0 for node in kept if node != liar}
        if rows > 1:
            row = epoch.replica_of(liar)
            paced.awaited = {node: AwaitedSums(row, is_total=True) for node in kept if node != liar}
        paced.steps(1)
    slow = [node for node in "abcdefghwxyz" if any("is slow" in line for line in paced.lines(node))]
    assert liar in slow and not paced.run.epoch.has(liar)
    assert len(slow) == (1 if rows > 2 else 2), slow


def test_who_is_slow_again_after_a_while_is_kept_from_stages_for_longer() -> None:
    paced = PacedRun("ab", "x").steps(12)
    lasted = []
    for _ in range(3):
        lied(paced, "b", at_deadline, Phase.STEPPING, 8)
        left = paced.run.epoch.step
        assert "b" not in paced.hosts
        while "b" not in paced.hosts and paced.run.epoch.step - left < 3 * MEMORY_STEPS:
            paced.steps(1)
            candidates = [one.node_id for one in paced.run.machine._candidates()]
            if candidates[-1] == "b" and len(candidates) > 2:
                break
        lasted.append(paced.run.epoch.step - left)
        # The spare goes, so that the liar gets a stage again.
        spare = paced.hosts[1]
        paced.actions += paced.run.die(spare)
        paced.run.hello(spare, again=True)
        assert "b" in paced.hosts
        paced.steps(1)
    assert lasted[0] >= MEMORY_STEPS - SLOW_STEPS and lasted[1] > 1.5 * lasted[0]


@each("phase", [Phase.APPLYING, Phase.PLACING, Phase.RESTORING])
def test_who_is_late_in_one_phase_alone_gives_its_stage_to_a_spare(phase: Phase) -> None:
    paced = PacedRun("abc", "xy").steps(6)
    for _ in range(5):
        paced.late[phase]["b"] = 0.93 * (30 if phase is Phase.APPLYING else 85)
        if phase is not Phase.APPLYING:
            paced.actions += paced.run.failed("c")  # for whatever reason, the epoch ends
        paced.steps(3)  # with a snapshot, before which all say that they have applied the step
        if "b" not in paced.hosts:
            break
    assert "b" not in paced.hosts
    assert paced.lines("b")[0].startswith("node b (stage 1) is slow: it holds up each time that it was")


def test_who_computes_slowly_by_its_own_account_gives_its_stage_to_a_spare() -> None:
    """Another program shares its machine: all wait for it, and it says itself what it does."""
    paced = PacedRun("abc", "x").steps(12)
    paced.work["b"] = 4 * WORK
    paced.steps(SLOW_STEPS + 4)
    assert paced.hosts == ("a", "x", "c")
    assert len(paced.lines("b")) == 1 and paced.run.machine.quarantined == {}


# ---- no other node would be faster


def test_without_a_spare_a_slow_node_stays_and_is_named_once() -> None:
    paced = PacedRun("abc").steps(12)
    paced.late[Phase.STEPPING]["b"] = 8.0
    paced.steps(60)
    (line,) = paced.lines("b")
    assert line.startswith("node b (stage 1) is slow") and line.endswith(
        "no other node is there that would be faster"
    )
    assert paced.run.epoch.number == 1


def test_a_spare_that_was_as_slow_does_not_take_the_stage_back() -> None:
    paced = PacedRun("ab", "x").steps(12)
    paced.late[Phase.STEPPING] = {"b": 8.0, "x": 8.0}
    paced.steps(3 * MEMORY_STEPS)
    assert paced.run.epoch.number <= 3, "each may try once"


@each(("late", "takes"), [(8.0, False), (25.0, True)])
def test_a_spare_takes_a_stage_only_if_it_would_be_faster(late: float, takes: bool) -> None:
    paced = PacedRun("ab", "x", rates={"a": 1e13, "b": 1e13, "x": 1e12}).steps(12)
    paced.late[Phase.STEPPING]["b"] = late
    paced.steps(10)
    assert ("x" in paced.hosts) is takes


# ---- honest runs


@each("how", ["compiles", "network", "stalls", "resumed", "more", "bound"])
def test_honest_nodes_that_are_slow_keep_their_stages(how: str) -> None:
    past = None
    if how == "resumed":
        steps = [PastStep(loss=2.0, grad_norm=1.0, seconds=0.05) for _ in range(50)]
        past = Past(newest=tuple(steps))
    paced = PacedRun("abc", "xy", past=past)
    draws = random.Random(how)
    for step in range(80):
        late: Mapping[str, float] = {}
        if how == "compiles" and step == 0:
            late = {"b": 100.0}
        elif how == "stalls" and draws.random() < 0.1:
            late = {draws.choice("abc"): draws.uniform(1, 6)}
        elif how == "network" and step > 20:
            paced.network = draws.uniform(8, 12)  # others share the line from now on
        elif how == "more" and step > 20:
            paced.work = dict.fromkeys("abcxy", 5 * WORK)  # it is hot, and all cards are throttled
        elif how == "bound":
            late = {"a": 1.5}  # the first stage ends its backward after the others
        paced.late[Phase.STEPPING] = dict(late)
        paced.steps(1)
    assert paced.run.epoch.number == 1
    assert all(not paced.lines(node) for node in "abc")
