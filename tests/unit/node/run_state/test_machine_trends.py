"""Members whose norms lie a little more in each step, and honest runs whose norms move as much."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from node.run_state.actions import Action, Announce, RecordCommit, Stop
from node.run_state.epoch import Phase
from node.run_state.run_plan import Past
from node.run_state.votes import CLIPPED_STEPS, LEAST_CLIP, PastStep
from tests.support.cases import each
from tests.support.machine_driver import Driver, of_kind, stop_of

Curve = Callable[[int], float]
"""Step -> factor on an honest squared norm."""
HONEST = 3.0


def honest(step: int, stage: int, spread: float = 0.4) -> float:
    """An honest squared norm, the same on every node."""
    return HONEST * math.exp(random.Random(2 * step + stage).gauss(0.0, spread))


def steady(step: int) -> float:
    return 1.0


class Trend:
    """A run of two stages in which curves say the votes of each stage; `liar` has its own."""

    def __init__(self, nodes: str = "ab", spares: str = "xy", past: Past | None = None) -> None:
        self.run = Driver(stages=2, every=1, steps=10_000, past=past)
        self.run.join(nodes)
        self.run.restored()
        self.run.join(spares)
        self.actions: list[Action] = []

    @property
    def stopped(self) -> bool:
        return self.run.machine.stopped

    def step(self, norms: tuple[float, float], liar: str = "", lie: float = 0.0) -> bool:
        """One step, until it is committed; whether the liar still had a stage when it was."""
        run = self.run
        at = run.epoch.step
        while run.epoch.step == at and run.epoch.phase is Phase.STEPPING:
            for node, norm in zip(run.epoch.hosts, norms, strict=True):
                self.actions += run.vote(node, norm=lie if node == liar else norm)
                if self.stopped:
                    return True
            if run.epoch.phase is Phase.PLACING:
                run.restored(at)
                if self.run.machine.stopped:
                    return True
        kept = liar in run.epoch.hosts
        if run.epoch.phase is Phase.APPLYING:
            self.actions += run.all_applied()
        run.stored(at + 1)
        return kept

    def until_found(self, liar: str, curve: Curve, most: int) -> int:
        """How many of its lies are committed before it loses its stage; `most` if it keeps it."""
        for lies in range(most):
            at = self.run.epoch.step
            norms = honest(at, 0), honest(at, 1)
            if not self.step(norms, liar, norms["ab".index(liar)] * curve(lies + 1)):
                return lies
            if self.stopped:
                return lies
        return most

    def lines(self, node: str = "") -> list[str]:
        return [one.text for one in of_kind(self.actions, Announce) if node in (one.about, "")]

    def honest(
        self, steps: int, first: Curve = steady, second: Curve = steady, spread: float = 0.4
    ) -> "Trend":
        for _ in range(steps):
            at = self.run.epoch.step
            self.step((honest(at, 0, spread) * first(at), honest(at, 1, spread) * second(at)))
        return self


@dataclass(frozen=True)
class Lie:
    """A curve of factors on honest squared norms, and the most steps until it is found."""

    curve: Curve
    most: int


LIES = {
    "doubles": Lie(lambda n: 2.0**n, 20),
    "x1.3": Lie(lambda n: 1.3**n, 50),
    "x1.05": Lie(lambda n: 1.05**n, 240),
    "x10": Lie(lambda n: 10.0**n, 8),
    "every second step": Lie(lambda n: 4.0**n if n % 2 else 1.0, 12),
    "jumps to a plateau": Lie(lambda _: 3000.0, 8),
    "climbs by jumps": Lie(lambda n: 50.0 ** (1 + n // 20), 40),
    "halves": Lie(lambda n: 0.5**n, 60),
    "shrinks tenfold": Lie(lambda n: 0.1**n, 15),
    "nothing at all": Lie(lambda _: 0.0, 8),
}


@pytest.mark.parametrize("lie", LIES)
@each(("before", "stage"), [(12, 0), (100, 1)])
def test_a_trend_that_another_node_refutes_costs_the_liar_its_stage(
    lie: str, before: int, stage: int
) -> None:
    trend = Trend().honest(before)
    liar = "ab"[stage]
    assert trend.until_found(liar, LIES[lie].curve, LIES[lie].most + 1) <= LIES[lie].most
    assert any("was wrong, as another node found" in line for line in trend.lines(liar))
    assert {"ab"[1 - stage]} < set(trend.run.epoch.hosts), "the honest one keeps its own"
    trend.honest(30)
    records = of_kind(trend.actions, RecordCommit)[-30:]
    assert max(record.norms[0] for record in records) < 100 * HONEST


def falls(step: int) -> float:
    """The first steps of a training: squared norms fall by 10,000."""
    return 1 + 1e4 * math.exp(-step / 4)


def rises(step: int) -> float:
    """Weights that begin at 0 slowly let gradients through."""
    return min(1.0, 1e-3 * (1 + step) ** 2)


def spikes(step: int) -> float:
    """Three steps of every fifty have norms 30 times as large."""
    return 1e3 if step % 50 in (20, 21, 22) else 1.0


def changes(step: int) -> float:
    """A later phase of the training, with norms 20 times as large from one step to the next."""
    return 400.0 if step > 120 else 1.0


def vanishes(step: int) -> float:
    """All text is learned by heart."""
    return math.exp(-step / 3)


@each(
    ("curve", "spread"),
    [(falls, 0.4), (spikes, 0.4), (changes, 0.4), (vanishes, 0.4), (steady, 1.5), (spikes, 1.0)],
)
def test_honest_norms_cost_no_step(curve: Curve, spread: float) -> None:
    """`spread`: how much steps differ; with small batches one in twenty is ten times as far off as others."""
    trend = Trend().honest(250, curve, curve, spread)
    assert trend.run.epoch.number == 1 and trend.lines() == []


def test_honest_norms_that_rise_in_one_stage_alone_cost_its_node_nothing() -> None:
    """They look like a lie, until another node computes the same."""
    trend = Trend().honest(200, rises, falls)
    assert trend.run.epoch.step == 200 and trend.run.epoch.number <= 6
    assert not any("was wrong" in line for line in trend.lines())
    assert trend.run.machine.quarantined == {}


# ---- nobody is left to compute it again


def test_with_no_spare_a_trend_is_said_once_and_ends_the_run_when_it_is_absurd() -> None:
    trend = Trend(spares="").honest(50)
    lies = trend.until_found("a", LIES["doubles"].curve, 100)
    (line,) = trend.lines("a")
    assert line.startswith("node a: the squared norm of layer unit 0 at stage 0 is")
    assert line.endswith("and no other node is left to compute it again: let one more node join")
    assert lies <= 50
    (stop,) = of_kind(trend.actions, Stop)
    assert stop.failed and "evict node a, then resume" in stop.reason


def test_gradients_clipped_to_next_to_nothing_for_many_steps_are_said_once() -> None:
    large, larger = (lambda _: 1e4), (lambda _: 3e4)
    trend = Trend(spares="").honest(CLIPPED_STEPS - 1, large, larger)
    assert trend.lines() == []
    (line,) = trend.honest(CLIPPED_STEPS, large, larger).lines()
    assert line.startswith(f"in {CLIPPED_STEPS} steps running training.clip left less than {LEAST_CLIP:.0%}")
    assert "node b reports for stage 1" in line


# ---- a resumed run


@each("lie", ["doubles", "x1.3"])
def test_a_resumed_run_knows_what_norms_were_before(lie: str) -> None:
    before = 200
    norms = [honest(at, 0) * (LIES[lie].curve(at - 190) if at > 190 else 1.0) for at in range(before)]
    steps = [
        PastStep(loss=2.0, grad_norm=math.sqrt(norm), seconds=1.0, norms={0: norm, 3: honest(at, 1)})
        for at, norm in enumerate(norms)
    ]
    resumed = Trend(past=Past(newest=tuple(steps)))
    most = LIES[lie].most - 9
    assert resumed.until_found("a", lambda n: LIES[lie].curve(n + 9), most + 1) <= most


# ---- several rows


@each("factor", [1.3, 2.0, 0.5])
@each("rows", [2, 3])
def test_a_norm_that_one_of_several_rows_tells_alone_is_never_committed(factor: float, rows: int) -> None:
    """Rows have the same gradient, so a trend is found in its first step."""
    nodes = "abc"[:rows]
    run = Driver(stages=1, every=1, steps=100, groups=rows)
    run.join(nodes)
    run.restored()
    run.steps(20)
    actions: list[Action] = []
    for _ in range(6):
        at = run.epoch.step
        for node in run.epoch.hosts:
            if run.machine.epoch is not None and run.epoch.phase is Phase.STEPPING:
                actions += run.vote(node, norm=factor if node == "b" else 1.0)
        if run.machine.epoch is None:
            break
        if run.epoch.phase is Phase.PLACING:
            run.restored(at)
        else:
            actions += run.all_applied()
    if rows == 2:
        stop = stop_of(actions)
        assert stop.failed and "a (stage 0 of row 0) and b (stage 0 of row 1)" in stop.reason
    else:
        assert "b" not in run.epoch.hosts and run.epoch.step > 20
    assert {record.norms[0] for record in of_kind(actions, RecordCommit)} <= {1.0}
