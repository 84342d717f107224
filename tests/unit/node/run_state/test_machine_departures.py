"""A member that ends, leaves or fails each time it takes part; and honest members that come and go."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from node.run_state.actions import Aborted, Action, Announce, OpenSnapshot, StepDone
from node.run_state.epoch import Phase
from node.run_state.failures import LEAST_ENDS, MEMORY_STEPS
from tests.support.cases import each
from tests.support.machine_driver import RECONNECT, Driver, of_kind
from wire.messages import FailureKind

Ends = Callable[["Churn", str], None]
"""What a member does in place of a vote."""


class Churn:
    """A run whose members may end instead of voting, and come again after some seconds."""

    def __init__(self, nodes: str, spares: str = "", *, rows: int = 1, step_seconds: float = 10.0) -> None:
        self.run = Driver(stages=len(nodes) // rows, every=5, steps=100_000, groups=rows)
        self.step_seconds = step_seconds
        self.actions: list[Action] = []
        self.done = 0
        self.away: dict[str, float] = {}
        """Who is not there, and when it comes again."""
        self.ended: Counter[str] = Counter()
        for node in nodes + spares:
            self.run.owners[node] = f"the machine of {node}"
            self.run.hello(node)

    @property
    def aborted(self) -> int:
        return len([one for one in of_kind(self.actions, Aborted) if one.kind != "placement"])

    def lines(self, node: str) -> list[str]:
        return [one.text for one in of_kind(self.actions, Announce) if one.about == node]

    def take(self, actions: list[Action]) -> None:
        self.actions += actions
        self.done += len(of_kind(actions, StepDone))
        for asked in of_kind(actions, OpenSnapshot):
            self.take(self.run.stored(asked.step))

    def step(self, ends: Callable[[str], Ends | None]) -> None:
        """One attempt at a step, in which hosts may end in place of voting."""
        run = self.run
        for node in [node for node, until in self.away.items() if until <= run.time]:
            del self.away[node]
            self.take(run.hello(node, again=True))
        if run.machine.epoch is None:
            self.take(run.tick(1.0))
            return
        if run.epoch.phase is Phase.PLACING:
            for node in run.epoch.hosts:
                self.take(run.placed(node, run.epoch.step))
            for node in run.epoch.hosts:
                self.take(run.ready(node))
        epoch = run.epoch
        self.take(run.tick(self.step_seconds))
        for node in epoch.hosts:
            if run.machine.epoch is not epoch or epoch.phase is not Phase.STEPPING:
                break
            if (how := ends(node)) is not None:
                self.ended[node] += 1
                how(self, node)
            else:
                self.take(run.vote(node))
        if run.machine.epoch is epoch and epoch.phase is Phase.APPLYING:
            for node in epoch.hosts:
                self.take(run.applied(node))


def dies(churn: Churn, node: str) -> None:
    churn.run.machine.disconnected(node, churn.run.time)
    churn.take(churn.run.tick(RECONNECT + 0.1))
    churn.away[node] = churn.run.time + 5


def says_that_it_ends(churn: Churn, node: str) -> None:
    churn.take(churn.run.machine.lost(node, "it ended", churn.run.time))
    churn.away[node] = churn.run.time + 5


def starts_again(churn: Churn, node: str) -> None:
    churn.take(churn.run.hello(node, again=True))


def leaves(churn: Churn, node: str) -> None:
    """It votes for this step, and is gone after it."""
    churn.take(churn.run.leave(node))
    churn.take(churn.run.vote(node))
    churn.away[node] = churn.run.time + 5


def fails(churn: Churn, node: str) -> None:
    churn.take(churn.run.failed(node, FailureKind.INTERNAL))


def comes_as_another(churn: Churn, node: str) -> None:
    churn.run.machine.disconnected(node, churn.run.time)
    churn.take(churn.run.tick(RECONNECT + 0.1))
    other = chr(ord(node) + 1)
    churn.run.owners[other] = churn.run.owners[node]
    churn.away[other] = churn.run.time + 5


HOW: dict[str, Ends] = {
    "dies": dies,
    "says that it ends": says_that_it_ends,
    "starts again": starts_again,
    "leaves": leaves,
    "fails": fails,
    "comes as another": comes_as_another,
}


@pytest.mark.parametrize("how", HOW)
@each("every", [1, 2, 3])
@each("rows", [1, 2])
def test_who_ends_each_time_it_takes_part_gets_no_stage_for_a_while(how: str, every: int, rows: int) -> None:
    """`every`: it does so in each of so many steps in which it takes part. It gets its stage back since no
    other node is left, or since its row comes again with it at each snapshot."""
    churn, liars = Churn("abct" if rows == 2 else "abt", rows=rows), "tuvwyz"
    if how == "fails" and rows == 1:
        churn.take(churn.run.hello("x"))  # else a step that fails again and again ends the run
    turns = Counter[str]()

    def ends(node: str) -> Ends | None:
        turns["of the liar"] += node in liars
        return HOW[how] if node in liars and turns["of the liar"] % every == 0 else None

    def ended() -> int:
        return sum(churn.ended.values())

    for _ in range(200):
        churn.step(ends)
        if any("others do not" in line for node in liars for line in churn.lines(node)):
            break
        # A step that fails with all nodes alive is tried four times.
        assert ended() <= (LEAST_ENDS if how != "fails" else 4 * LEAST_ENDS)
    if rows == 1:
        churn.take(churn.run.hello("x"))
        for _ in range(20):
            churn.step(ends)
    before, known = churn.done, ended()
    for _ in range(MEMORY_STEPS + 40):
        if churn.done - before < MEMORY_STEPS - 40:
            churn.step(ends)
    assert churn.done - before >= MEMORY_STEPS - 40
    assert ended() <= known + (how == "fails"), "it aborts nothing meanwhile"
    assert churn.run.machine.quarantined == {}
    assert not any(churn.lines(node) for node in "abcx")


def test_the_time_without_a_stage_doubles_and_is_forgiven() -> None:
    churn, told = Churn("abct", rows=2), [0]
    for _ in range(900):
        lies = churn.done < 350
        churn.step(lambda node, lies=lies: dies if node == "t" and lies else None)
        if len(churn.lines("t")) >= len(told):
            told.append(churn.done)
    waits = [after - before for before, after in pairwise(told[1:])]
    assert len(waits) >= 2 and waits[0] >= MEMORY_STEPS and waits[1] >= 2 * MEMORY_STEPS
    assert churn.run.epoch.has("t"), "in the end it has a stage again"
    assert churn.aborted <= LEAST_ENDS + len(told)


@each("step_seconds", [2.0, 10.0, 60.0])
@each("rows", [1, 2, 3])
def test_where_all_come_and_go_nobody_is_kept_out(step_seconds: float, rows: int) -> None:
    """Everyone dies at 5 % a minute, and comes again."""
    draws, chance = random.Random(f"{rows} {step_seconds}"), 0.05 * step_seconds / 60
    churn = Churn("abcdef", "xyz", rows=rows, step_seconds=step_seconds)
    for _ in range(200):
        churn.step(lambda _: dies if draws.random() < chance else None)
    assert not any(churn.lines(node) for node in "abcdefxyz")
    assert churn.done > 50


def test_a_line_that_breaks_for_all_counts_against_nobody() -> None:
    churn = Churn("abcd", rows=2)
    for turn in range(200):
        broken = turn % 20 == 10
        churn.step(lambda node, broken=broken: dies if broken else None)
    assert sum(churn.ended.values()) >= 8
    assert not any(churn.lines(node) for node in "abcd")
