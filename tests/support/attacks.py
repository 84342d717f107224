"""Attacks on a run as data, and what its honest members see of them, in real processes.

`MEMBERS` are lies of one member (`tests.support.liar`), in a run of three stages and two spares. `attack`
runs one of them and returns a `Seen`.
"""

import contextlib
import fcntl
import io
import random
import subprocess
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from node.cli.main import main
from node.config.schema import AuditSection
from node.display.render import event_lines
from node.telemetry.events import (
    Event,
    NodeJoined,
    NodeLeft,
    Notice,
    PlacementMade,
    RunFinished,
    SeatFilled,
    SeatLost,
    SnapshotStored,
    StepAborted,
    StepDone,
)
from node.tuning.snapshot_place import is_url
from tests.support.fault_run import FaultRun, small
from tests.support.faults import Fault, Kind, Phase
from tests.support.liar import LATE
from tests.support.process import Process, StuckError
from tests.support.run_harness import Launch, undisturbed

STEPS, SNAPSHOT_EVERY, LIES_FROM = 10, 3, 4
STORE = "store"
STAGES = 3
STUCK_SECONDS = 60.0
"""Without any line from the coordinator a run counts as stuck."""
MOST_SECONDS = 180.0
"""A run that still does not end counts as stuck, too."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One member's lie."""

    name: str
    what: str
    """A description, for the table."""
    lie: str
    """A key of `tests.support.liar.LIES` or `FLAWS`."""
    step: int = LIES_FROM
    """The first step with the lie, from 0."""
    stage: int = 1
    """The liar's first stage; with two rows its number in the grid, row after row."""
    spares: int = 2
    rows: int = 1
    """With several rows, of two stages each, the liar may be in any."""
    audits: bool = True
    """Whether every step of several rows is audited."""
    keep: str = "coordinator"
    """Where snapshots are kept; `STORE`: an object store's folder on this machine."""
    gateways: int = 0
    """Processes that keep the control sessions in place of the coordinator."""
    steps: int = STEPS
    """The run's."""
    comes_back: bool = False
    """Its process is started again each time that it is killed."""
    saves: bool = False
    """Every snapshot that is due is taken all the same."""
    is_exact: bool = True
    """It changes no bit. Else what it says counts until it is found: norms within bounds scale clipping."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one attack did to a run."""

    name: str
    what: str
    ended: bool
    """The run reached its last step."""
    bits_equal: bool
    """Losses and weights equal an undisturbed run's."""
    steps_again: int
    """Attempts at steps that were aborted."""
    longest_wait: float
    """The most seconds without a new step, from the first lie to the end of the run."""
    replaced: bool
    """The attacker has lost its stage."""
    honest_harmed: tuple[str, ...]
    """Why honest members left before the end, and how they ended if not well."""
    line: str
    """The line that the operator reads."""
    status: tuple[str, ...]
    """Lines of `thinwire status` about the attacker, after the run."""
    is_exact: bool = True
    """Whether the bits have to be equal."""
    missed: tuple[int, ...] = ()
    """Steps whose snapshots should have been taken, and were not."""

    @property
    def good(self) -> bool:
        """The run ends as an undisturbed one, no honest member is harmed, the liar has lost its stage, and a
        line names it, then and in the run's status."""
        unharmed = self.ended and (self.bits_equal or not self.is_exact)
        unharmed = unharmed and not self.honest_harmed and not self.missed
        return unharmed and self.replaced and bool(self.line) and bool(self.status)


_AT_A_GATEWAY = Attack(
    name="flood-gateway",
    what="sends heartbeats that name 4,000 links, to a gateway",
    lie="flood-heartbeats",
    gateways=1,
)

MEMBERS = tuple(
    Attack(name=lie, what=what, lie=lie)
    for lie, what in (
        ("nan-once", "votes a norm that is not a number, once"),
        ("nan", "votes norms that are not numbers"),
        ("not-finite", "says in each step that a gradient is not finite"),
        ("internal", "says in each step that something broke"),
        ("accuse-one", "accuses the same neighbour in each step"),
        ("accuse-both", "accuses its neighbours in turn"),
        ("blame-link", "says in each step that a neighbour's link failed"),
        ("negative-norm", "votes norms of -1, and connects again each time"),
        ("no-vote", "never votes"),
        ("no-applied", "never says that it has applied a step"),
        ("silent", "stays connected and says nothing"),
        ("idle", "does nothing, and answers on every connection"),
        ("slow-votes", "votes 3 s late in each step, in time for every deadline"),
        ("reconnect", "drops its session at every message"),
        ("withhold-layers", "never hands in its layers"),
        ("huge-layers", "hands in layers of 64 MB"),
        ("short-layers", "hands in halves of its layers"),
        ("other-layers", "hands in layers of another dtype"),
        ("negative-layers", "hands in layers whose second moments are negative"),
        ("unasked-layers", "hands in layers that nobody asked for"),
        ("flood-heartbeats", "sends heartbeats that name 4,000 links"),
        ("huge-loss", "reports a loss of -1e300, whether it has the head or not"),
        ("norms-of-others", "votes norms of layers that it does not hold"),
        ("huge-norm", "votes norms of 1e60"),
        ("ones-tensors", "sends tensors of ones in place of each bit"),
        ("short-tensors", "sends tensors without their end"),
        ("long-tensors", "sends tensors with a megabyte more"),
        ("repeated-tensors", "sends each tensor twice"),
        ("late-tensors", "sends each tensor 0.75 s late"),
        ("false-place", "says that it holds the state of step 1,000,000, and fails in each step"),
        ("next-place", "says that it holds the state of the next step, and fails in each step"),
        ("no-tensors", "sends no tensors"),
        ("random-frames", "sends frames of random bytes"),
        ("kept-gradients", "votes, and keeps the gradients that its neighbour needs"),
        ("some-links-fail", "says twice in each step that a neighbour's link failed"),
        ("never-places", "never takes its place, and says that it prepares"),
        ("never-loads", "never loads its state"),
    )
) + tuple(
    Attack(name=name, what=what, lie=flaw, rows=2, spares=spares)
    for name, flaw, spares, what in (
        ("wrong-activations", "wrong-activations", 2, "computes activations that are finite and wrong"),
        ("wrong-gradients", "wrong-gradients", 2, "computes gradients that are finite and wrong"),
        ("wrong-no-spare", "wrong-gradients", 0, "computes wrong gradients, in a run without spares"),
    )
)
SUMS = tuple(
    Attack(name=flaw, what=what, lie=flaw, rows=3, audits=False)
    for flaw, what in (
        ("kept-parts", "keeps its part of gradients that another row sums up"),
        ("kept-sums", "votes, and keeps the sums of gradients that it makes for other rows"),
    )
)
STATES = tuple(
    Attack(name=flaw, what=what, lie=flaw, rows=3, spares=spares, audits=False, keep=keep)
    for flaw, spares, keep, what in (
        ("zero-layers", 2, "coordinator", "trains honestly, and hands in zeros as its layers"),
        ("random-layers", 2, "coordinator", "hands in layers of the same norms and another model"),
        ("scaled-layers", 0, "coordinator", "hands in weights times 1.001"),
        ("zero-moments", 0, "nodes", "saves layers without the optimizer's moments"),
        ("hash-of-another", 0, "coordinator", "says other hashes than its layers have"),
        ("layer-of-another", 0, "nodes", "saves other layers than it says"),
    )
) + tuple(
    Attack(
        name=f"late-{lie}",
        what=what,
        lie=f"{lie}{LATE}",
        rows=3,
        spares=0,
        audits=False,
        steps=14,
        saves=True,
    )
    for lie, what in (
        ("layer-of-another", "hands in other layers than it says, when steps have gone on"),
        ("huge-layers", "hands in layers of 64 MB, when steps have gone on"),
    )
)
STORED = Attack(
    name="stored-layer-of-another",
    what="saves other layers than it says in an object store",
    lie="layer-of-another",
    rows=3,
    spares=0,
    audits=False,
    keep=STORE,
    steps=14,
    saves=True,
)
REPLAYED = Attack(
    name="replayed-loss",
    what="says that it lost its state, and reports other losses for the steps that run again",
    lie="replayed-loss",
    stage=STAGES - 1,
    step=SNAPSHOT_EVERY,
)
SLOWLY = (
    Attack(
        name="growing-norms",
        what="votes squared norms that double in each step",
        lie="growing-norms",
        step=15,
        steps=50,
        is_exact=False,
    ),
    Attack(
        name="dies",
        what="dies instead of voting, and comes back, each time that it has a stage",
        lie="dies",
        rows=2,
        spares=0,
        audits=False,
        steps=600,
        comes_back=True,
    ),
)
"""Longer ones: what they do shows in many steps."""
FLOODS = tuple(
    Attack(name=lie, what=what, lie=lie, steps=60)
    for lie, what in (
        ("flood-spans", "sends spans that nobody asked for"),
        ("flood-hashes", "reports hashes of 500 layers of states that nobody asked for"),
        ("flood-times", "reports times of 2,000 relays that it was not told of"),
    )
)
"""They take three faults, and fast steps are over before."""
MEMBERS = (*MEMBERS, REPLAYED, *FLOODS, _AT_A_GATEWAY, *SUMS, *STATES, STORED, *SLOWLY)


# ---- members that lie


class LyingRun(FaultRun):
    """A run of three stages, or of two rows of two, with a liar among them, held until the
    spares are there."""

    def __init__(self, directory: Path, chosen: Attack, *, launch: Launch = subprocess.Popen) -> None:
        config = small(steps=chosen.steps, snapshot_every=SNAPSHOT_EVERY, silent_seconds=10.0)
        if chosen.rows > 1:
            groups = 2 if chosen.rows == 2 else 4
            rows = replace(
                config.pipeline, stages=2, groups=groups, replicas=chosen.rows, sync_codec="fixed-8"
            )
            config = replace(config, pipeline=rows, audit=AuditSection(rate=float(chosen.audits)))
            keep = f"file://{directory}/{STORE}" if chosen.keep == STORE else chosen.keep
            config = replace(config, snapshots=replace(config.snapshots, keep=keep))
        config = replace(config, coordinator=replace(config.coordinator, gateways=chosen.gateways))
        self.hosts = config.pipeline.stages * chosen.rows
        # Rows join before the first step is done, or at a snapshot.
        hold = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=int(chosen.rows == 1))
        super().__init__(directory, config, [hold], launch=launch)
        self.marker = directory / "lied"
        self.liar: Process | None = None
        self._again: list[Process] = []
        """The liar's later processes."""
        self._chosen = chosen
        self._spares_wait = contextlib.ExitStack()
        fcntl.flock(self._spares_wait.enter_context(self.plan.gate(hold).open("a")), fcntl.LOCK_EX)

    def __exit__(self, *error: Any) -> None:
        self._spares_wait.close()
        super().__exit__(*error)

    def assemble(self, *, liar_at: int, hasty: bool) -> None:
        """Start the coordinator, the hosts, one after the other, and the spares; then the steps go on."""
        self.program = ("tests.support.hasty",) if hasty else self.program
        coordinator = self.start()
        self.program = ("node.cli.main",)
        for number in range(self.hosts + self._chosen.spares):
            lies = number == liar_at
            node = (
                self.add_spare()
                if number >= self.hosts
                else self.add_node(liar=self._chosen.lie if lies else "")
            )
            self.liar = node if lies else self.liar
            self.wait_joined(number + 1)
        coordinator.wait_event(PlacementMade)
        self._spares_wait.close()

    def add_node(self, token: str | None = None, *, state_dir: Path | None = None, liar: str = "") -> Process:
        comes_back = self.liar is not None and state_dir == self.state_dirs[self.liar]
        if liar or comes_back:
            lie = self._chosen.lie, str(self._chosen.step), str(self.marker)
            self.program = ("tests.support.liar", *lie)
        try:
            keep = self.config.snapshots.keep
            options = ("--store", keep) if is_url(keep) else ()
            node = super().add_node(token, state_dir=state_dir, options=options)
        finally:
            self.program = ("node.cli.main",)
        self._again += [node] * comes_back
        return node

    @property
    def honest(self) -> list[Process]:
        return [node for node in self.nodes if node is not self.liar and node not in self._again]

    def wait_joined(self, count: int) -> None:
        """Wait until `count` nodes have joined."""
        joined: set[str] = set()

        def enough(event: NodeJoined) -> bool:
            joined.add(event.node_id)
            return len(joined) >= count

        self.coordinators[-1].wait_event(NodeJoined, enough)


def anywhere(chosen: Attack, seed: int) -> Attack:
    """The same lie at a stage and from a step that the seed says."""
    draw = random.Random(f"{seed} {chosen.name}")
    places = STAGES if chosen.rows == 1 else 2 * chosen.rows
    return replace(
        chosen,
        stage=draw.randrange(places),
        step=draw.randrange(1, STEPS - 1) if chosen.steps == STEPS else chosen.step,
    )


def attack(
    chosen: Attack, directory: Path, *, launch: Launch = subprocess.Popen, hasty: bool = False
) -> Seen:
    """Run one attack of a member to the end of the run, or until nothing happens any more.

    `hasty`: the coordinator waits for members as `tests.support.hasty` does.
    """
    with LyingRun(directory, chosen, launch=launch) as run:
        run.assemble(liar_at=chosen.stage, hasty=hasty)
        code, deadline = None, time.monotonic() + MOST_SECONDS
        with contextlib.suppress(StuckError):
            code = run.tend(
                restart=chosen.comes_back, seconds=STUCK_SECONDS, until=lambda _: time.monotonic() > deadline
            )
        return _seen(run, chosen, code, stuck=code is None)


def assert_harmless(lie: str, seed: int, says: str, directory: Path, *, launch: Launch) -> None:
    """This lie changes no honest node's result, wherever the seed places the liar, and the operator reads
    `says` about it. One spare is enough for one liar."""
    (known,) = (member for member in MEMBERS if member.name == lie)
    chosen = replace(anywhere(known, seed), spares=min(known.spares, 1))
    seen = attack(chosen, directory, launch=launch, hasty=True)
    assert seen.good, (chosen, seen)
    # Where it lost its connection first, that is the line, and its status has the rest.
    assert any(says in line for line in (seen.line, *seen.status)), (chosen, seen)


def _seen(run: LyingRun, chosen: Attack, code: int | None, *, stuck: bool) -> Seen:
    assert run.liar is not None
    liar_id = run.node_id(run.nodes.index(run.liar)) or ""
    lied_at = float(run.marker.read_text(encoding="utf-8")) if run.marker.exists() else 0.0
    assert lied_at, "the liar never lied"
    before_end: list[tuple[float, Event]] = []
    for at, event in run.heard_at:
        if isinstance(event, RunFinished):
            break
        before_end.append((at, event))
    left = [event for _, event in before_end if isinstance(event, NodeLeft)]
    honest = [f"{event.node_id}: {event.reason}" for event in left if event.node_id != liar_id]
    if not stuck:
        honest += [
            f"exit code {node.wait_exit()}: {node.complaints}" for node in run.honest if node.wait_exit() != 0
        ]
    ended = code == 0 and len(run.records) == run.config.run.steps
    done, newest = [lied_at], 0
    for at, event in before_end:
        if isinstance(event, StepDone) and event.step > newest:
            newest = event.step
            done += [at] if at > lied_at else []
    done.append(next((at for at, event in run.heard_at if isinstance(event, RunFinished)), time.time()))
    return Seen(
        name=chosen.name,
        what=chosen.what,
        ended=ended,
        bits_equal=ended and _as_undisturbed(run),
        steps_again=len(run.all(StepAborted)),
        longest_wait=round(max((after - before for before, after in pairwise(done)), default=0.0), 2),
        replaced=not _has_stage(run, liar_id),
        honest_harmed=tuple(honest),
        line=_line(run, liar_id, stuck=stuck),
        status=() if stuck else _status(run, liar_id),
        is_exact=chosen.is_exact,
        missed=_missed(run) if chosen.saves else (),
    )


def _has_stage(run: LyingRun, node_id: str) -> bool:
    """At the end of the run."""
    has = False
    for _, event in run.heard_at:
        if isinstance(event, PlacementMade):
            has = node_id in event.nodes
        elif isinstance(event, SeatLost | SeatFilled) and event.node_id == node_id:
            has = isinstance(event, SeatFilled)
    return has


def _missed(run: LyingRun) -> tuple[int, ...]:
    due = range(SNAPSHOT_EVERY, run.config.run.steps, SNAPSHOT_EVERY)
    return tuple(sorted({*due} - {event.step for event in run.all(SnapshotStored)}))


def _status(run: LyingRun, liar_id: str) -> tuple[str, ...]:
    """What `thinwire status` says of the liar."""
    with contextlib.redirect_stdout(io.StringIO()) as status:
        assert main(["status", str(run.run_dir)]) == 0
    return tuple(line for line in status.getvalue().splitlines() if liar_id in line)


def _as_undisturbed(run: FaultRun) -> bool:
    expected = undisturbed(run.config)
    losses = {record.step + 1: record.loss for record in run.records}
    return losses == expected.losses and run.weights_sha256 == expected.weights_sha256


def _line(run: LyingRun, liar_id: str, *, stuck: bool) -> str:
    """The line that says who was shut out and why; without one, how the run ended, or its last notice."""
    named, ends, notices = "", "", [""]
    for _, event in run.heard_at:
        lines = [line.replace(f"{run.directory}/", "") for line in event_lines(event) if line]
        if isinstance(event, RunFinished):
            ends = lines[0] if event.failed else ""
            break
        if isinstance(event, NodeLeft) and event.node_id == liar_id:
            return lines[0]
        if isinstance(event, Notice):
            notices.append(lines[0])
            named = lines[0] if liar_id in lines[0] else named
    return named or ends or (notices[-1] if stuck else "")
