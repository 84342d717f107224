"""One epoch: a fixed placement, from the first message that announces it to its end. Pure.

    PLACING     every stage says which state it holds
    RESTORING   every stage loads one common state and warms its links
    STEPPING    the step runs; stages vote
    APPLYING    the commit is recorded; stages apply the optimizer, and no step begins with it
    VALIDATING  between steps: forward passes over held-out samples
    IDLE        between steps, when the run must not begin another yet

A message with another epoch's number never reaches this object: `RunMachine` drops it.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from node.model.labels import BatchPart
from node.run_state.actions import (
    Action,
    Announce,
    RecordCommit,
    RecordHeldOut,
    RecordRestored,
    SeatFilled,
    SeatLost,
    SeatOffered,
    Send,
    StepDone,
)
from node.run_state.audits import Audit, Auditor, Contradiction, Difference, rows_alike
from node.run_state.grid import ONE_ROW, Groups, StepGroups, row_seconds, share_groups
from node.run_state.handed_over import HandedGroups
from node.run_state.held_out import HeldOutPass, pass_losses
from node.run_state.votes import (
    FiniteUncompressed,
    NonFinite,
    NotReproduced,
    Outcome,
    Overflow,
    RefusedVote,
    VoteHistory,
    disagreement,
    summed_loss,
    unscaled,
)
from node.schedule.gradient_groups import GroupTree
from node.training.loss_scale import SKIPPED, LossScales
from node.training.schedule import global_norm
from node.tuning.codec_plan import CodecPlan
from node.tuning.storage_choice import StoragePlan
from wire.messages import (
    Begin,
    Commit,
    CoordinatorMessage,
    HandedOver,
    Placed,
    PlacedRow,
    PlacedStage,
    Placement,
    Portion,
    Restore,
    Seat,
    SumsMissing,
    TakeSnapshot,
    Validate,
    Validated,
    Vote,
)

REMEMBERED_AUDITS = 16
PLACING_SECONDS = 90.0
"""A node that does not say within this time what state it holds is stuck, unless it says that it prepares.
It is longer than a node may take to end the previous epoch."""
PREPARING_SECONDS = 300.0
"""The same for a node that has just joined, and says that it compiles kernels, tests its device or measures
a block of a large model."""
MOST_SUMS = 4096
"""How many rows' runs of groups are remembered with the sums that they are sent as."""
ENTERING_SECONDS = 120.0
"""A node that does not open the links of its seat within this time does not get it, even if no other node
could have it."""
HANDING_STEPS = 30
"""Nodes hand over what they have computed in this many steps after a seat was lost. It costs traffic."""
PROOF_STEPS = 3
"""The number of recorded steps that a state from disk must repeat before it counts as the run's."""
State = tuple[int, int]
"""A step, and the lineage of a state after so many steps."""
Neighbours = Callable[[int, int], Collection[int]]
"""A function of (stage, number of stages) that gives the stages with which the stage has links."""
StepPlan = Callable[[int, float], tuple[float, float]]
"""A function of (step, global gradient norm) that gives (clip coefficient, learning rate)."""


class Phase(StrEnum):
    PLACING = "placing"
    RESTORING = "restoring"
    STEPPING = "stepping"
    APPLYING = "applying"
    VALIDATING = "validating"
    IDLE = "idle"


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The newest commit on record. Stages that voted for it may not have received it yet."""

    step: int
    clip_coefficient: float
    lr: float
    lineage: int | None = None
    """The lineages of the states before and after it; they are not on record."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The host of each seat, row after row; with one row, `hosts[i]` hosts stage i."""

    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    """The addresses at which others reach each host."""
    groups: Groups = ONE_ROW
    """The gradient groups that each row computes."""
    kinds: Sequence[Hashable] = ()
    """For each host, what the bits of its results depend on."""


@dataclass(frozen=True, kw_only=True)
class OnRecord:
    """What is on record about the run when an epoch begins."""

    newest_snapshot: int = 0
    newest_state: int = 0
    """The step after the newest commit."""
    committed: Committed | None = None
    lineages: Collection[int] | None = None
    """The lineages of states that belong to the run; None if that is not known, so any state counts that all
    stages have."""
    left: Collection[int] = ()
    """Lineages that nobody goes on from."""
    suspect_step: int | None = None
    """The step that was not finite, and runs again without compression."""
    seat_lost_at: int | None = None
    """The newest step in which a seat was lost; None if none was."""
    loaded: State = (0, 0)
    """The step of the snapshot that was loaded last, and the lineage that began with it."""


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """The objects by which all epochs of a run judge and commit steps."""

    plan: StepPlan
    neighbours: Neighbours
    history: VoteHistory
    auditor: Auditor = field(default_factory=lambda: Auditor(0.0, b"", lambda _: 0))
    scales: LossScales | None = None
    """The loss scale of a run that computes in float16."""
    unlabelled: Container[int] = ()
    """Steps without labels: the loss that nodes report for them does not count."""
    group_seconds: Callable[[str], float | None] = lambda _: None
    """The seconds that a node usually takes for a gradient group; None if they are not known."""
    handed_over: Callable[[str, float], object] = lambda *_: None
    """Called with a node and the seconds per gradient group after which it had handed over all of its row."""


class Epoch:
    """One epoch: which node has which seat, and the phase of the current step. `RunMachine` passes it the
    nodes' messages.

    Every message goes to all rows, except for snapshots and held-out passes, which one row answers for
    all.

    A row that loses a node is broken, and whole rows take its groups within the step, except for those that
    it has handed over. Its other nodes compute nothing, get the sums of gradients and apply the commits, like
    all others.
    """

    def __init__(
        self,
        number: int,
        assignment: Assignment,
        record: OnRecord,
        rules: StepRules,
        *,
        windows: tuple[int, ...] = (),
    ) -> None:
        """`windows`: as `planned_windows`."""
        self.number = number
        self.hosts = tuple(node for node in assignment.hosts if node)
        """The host of each seat now, row after row."""
        self.groups = assignment.groups
        self.kinds = list(assignment.kinds or ("",) * len(assignment.hosts))
        """For each seat, row after row like addresses, what the bits of its host's results depend on."""
        self.addresses = list(assignment.addresses)
        self.placed_nodes = list(assignment.hosts)
        """The node to which each seat was last given."""
        self.grid = list(assignment.hosts)
        """The node of each seat, row after row; "" for an empty seat."""
        self.entering: dict[str, int] = {}
        """Nodes that open the links of a seat. They get the seat when they hold the run's state."""
        self.entering_since: dict[str, float] = {}
        self._linking: set[str] = set()
        """The entering nodes that were told to open their links."""
        self._linked: set[str] = set()
        """The entering nodes whose links are open."""
        self._unheard: dict[str, tuple[int, int]] = {}
        """Nodes that were lost because nobody heard them: their seats, and in which step."""
        self.fresh: set[str] = set()
        """Nodes in their first step of the epoch, which they entered while it was on."""
        self._seats = {node: seat for seat, node in enumerate(assignment.hosts) if node}
        self.rows = len(assignment.groups)
        self.whole_rows: list[int]
        """Rows that have a node for every stage."""
        self.stages = len(assignment.hosts) // self.rows
        self._count_hosts()
        self._group_count = sum(map(len, assignment.groups))
        # A row's nodes ask for the same groups, after each death.
        self._sums_of = functools.lru_cache(maxsize=MOST_SUMS)(GroupTree(self._group_count).spans)
        self._late: dict[Seat, None] = {}
        """Seats that were filled within the step that runs, in the order in which they were."""
        self.seat_lost_at = record.seat_lost_at
        """The newest step in which a seat was lost; None if none was."""
        self._handed = HandedGroups()
        self.generation = 0
        """How often groups were shared again within the step, or a seat changed."""
        self.opened_at = 0.0
        """When the step that runs began."""
        self._rules = rules
        self._placed_runs = (*enumerate(self.groups),)
        self._shared = self._as_placed()
        """Which row computes which groups of the current step."""
        self.step = max(record.newest_snapshot, record.newest_state)
        """The step that runs, or runs next; until all are placed, where the record says that the run is."""
        self.phase = Phase.PLACING
        self.committed = record.committed
        self.lineage: int | None = None
        """The epoch that loaded what its states grew from: this one, where not all were held."""
        self.uncompressed = False
        """The epoch repeats a step that was not finite, with fp32 on every link; it never commits."""
        self.codecs: CodecPlan | None = None
        """The codec of each boundary; None if the codecs of the run file are used."""
        self.storages: StoragePlan | None = None
        """The storage of each stage; None if the coordinator does not choose it."""
        self.planned_windows = windows
        """The windows of each link, row after row, from the next step on; empty: those of the run file."""
        self.newcomers: frozenset[str] = frozenset()
        """Hosts that fetched their state while others held it, until they have shown that it is the same."""
        self.behind: list[str] = []
        """Hosts without the newest state that every stage has a node of; known once all are placed."""
        self.loaded = record.loaded
        """The step of the snapshot that was loaded last, and the lineage that began with it."""
        self._record = record
        self._newest_state = self.step
        self.steps_done = 0
        self.audit: Audit | None = None
        """What is audited in the current step."""
        self._has_digests = False
        """Whether votes for the current step have digests. This does not change if a death ends its audit."""
        self._uneven: dict[int, Sequence[int]] = {}
        """The newest steps in which rows computed other groups than they were placed with: as `computed`."""
        self._placed: dict[str, Placed] = {}
        self._answered: set[str] = set()
        self._known_losses: dict[int, float] = {}
        """Values by group of the current step that nodes which are gone have computed and that count."""
        self.votes: dict[str, Vote] = {}
        """Votes for the newest step, by node."""
        self._votes_from = 0
        """The generation since which no row's groups have changed: votes since then count."""
        self._complete: set[str] = set()
        """Nodes that have voted in the step that runs: they have all sums, and keep them to its end."""
        self._restore = Restore(epoch=number, step=0)
        self._snapshot: TakeSnapshot | None = None
        self.snapshot_nodes: tuple[str, ...] = ()
        """The row that the newest snapshot is taken from."""
        self._passes: Sequence[HeldOutPass] = ()
        self._microbatch, self._label_weight = 1, 1.0
        self._losses: list[float] = []
        """The losses of the passes that are done."""
        self._loss = math.nan
        self._windows: tuple[int, ...] = ()
        self._keeps_sums = False
        self._follows_commit = False
        """The step that runs began with the commit of the one before."""

    # ---- who is where

    def row(self, replica: int) -> tuple[str, ...]:
        """The nodes of a row, by stage; "" where nobody is."""
        return tuple(self.grid[replica * self.stages : (replica + 1) * self.stages])

    def column(self, stage: int) -> list[str]:
        """The nodes of a stage, one a row."""
        return [node for node in self.grid[stage :: self.stages] if node]

    @property
    def kinds_of(self) -> dict[str, Hashable]:
        """For each host, what the bits of its results depend on."""
        return {node: kind for node, kind in zip(self.grid, self.kinds, strict=True) if node}

    @property
    def speakers(self) -> tuple[str, ...]:
        """The first whole row, if possible one without a new node. Its votes stand for all rows."""
        rows = [self.row(row) for row in self.whole_rows]
        return next((row for row in rows if self.fresh.isdisjoint(row)), rows[0])

    @property
    def vacant(self) -> list[Seat]:
        """Seats where nobody is."""
        if len(self.hosts) == len(self.grid):
            return []
        return [Seat(*divmod(at, self.stages)) for at, node in enumerate(self.grid) if not node]

    def sources(self, stage: int) -> tuple[PlacedStage, ...]:
        """The nodes of a stage that others can reach."""
        places = zip(self.grid[stage :: self.stages], self.addresses[stage :: self.stages], strict=True)
        return tuple(
            PlacedStage(node_id=node, address=address) for node, address in places if node and address
        )

    def groups_of(self, replica: int) -> tuple[int, ...]:
        """The portion that a row computes in the current step."""
        return self._shared.of(replica)

    def given_at(self, node_id: str) -> float:
        """When a node's row got groups last within the step that runs; 0 if it has those it began with."""
        return self._shared.given_at.get(self.replica_of(node_id), 0.0)

    @property
    def most_groups(self) -> int:
        """The portion of any row in the current step, also of a row that has lost a node after all its
        votes."""
        return max(len(self.groups_of(row)) for row in range(self.rows))

    def takes_groups(self, row: int) -> bool:
        """Whether groups of the step that runs wait that this row would compute if it were whole."""
        return self._shared.is_for(row) and not self.keeps_groups(row)

    def keeps_groups(self, row: int) -> bool:
        """Whether a broken row has kept groups of the running step. Nobody fills its seats within that."""
        return row not in self.whole_rows and bool(self.groups_of(row))

    @property
    def waits(self) -> bool:
        """Whether some groups of the step that runs have no row yet."""
        return bool(self._shared.waiting)

    @property
    def portions(self) -> tuple[Portion, ...]:
        """Which row computes which groups of the current step; each group appears once. Groups that no row
        has yet are the portion of one additional row."""
        waiting = ((self.rows, tuple(self._shared.waiting)),) if self.waits else ()
        return tuple(Portion(row, groups) for row, groups in (*self._shared.runs, *waiting))

    def _as_placed(self) -> StepGroups:
        return StepGroups(dict(enumerate(self.groups)), self.opened_at)

    def _seconds(self, rows: Iterable[int]) -> dict[int, float | None]:
        """The seconds that rows usually take for a group; None if they are not known."""
        known = {node: took for node in self.hosts if (took := self._rules.group_seconds(node)) is not None}
        return {row: row_seconds(self.row(row), 1, known)[0] for row in rows}

    def has(self, node_id: str) -> bool:
        """Whether a node hosts a stage."""
        return node_id in self._seats

    def stage_of(self, node_id: str) -> int:
        return self._seats[node_id] % self.stages

    def replica_of(self, node_id: str) -> int:
        """The row of a node."""
        return self._seats[node_id] // self.stages

    @property
    def loss_stage(self) -> int:
        """The stage with the head, which gets labels and says losses."""
        return self._rules.history.loss_stage(self.stages)

    @property
    def is_loaded(self) -> bool:
        """Whether its stages loaded what is on disk."""
        return self.lineage == self.number

    @property
    def is_proving(self) -> bool:
        """Whether what was loaded from a snapshot still has to show that it is the run's state."""
        step, lineage = self.loaded
        return self.lineage == lineage and step > 0 and self.step - step < PROOF_STEPS

    @property
    def trained(self) -> Collection[int]:
        """Layer units that have had gradients."""
        return self._rules.history.trained

    @property
    def proven_rows(self) -> list[int]:
        """Whole rows whose nodes' state the run knows; all whole ones if there are none."""
        rows = self.whole_rows
        return [row for row in rows if self.newcomers.isdisjoint(self.row(row))] or rows

    @property
    def checked_rows(self) -> list[int]:
        """The proven rows each of whose nodes has the most others of its kind beside it, which hold the same
        bits. Nodes name their own kind, so nobody can check a node that invents one."""
        kinds, rows = self.kinds_of, self.proven_rows
        known = [
            Counter(kinds[node] for node in self.column(stage) if node not in self.newcomers)
            for stage in range(self.stages)
        ]
        alike = {
            row: min(count[kinds[node]] for count, node in zip(known, self.row(row), strict=True))
            for row in rows
        }
        return [row for row in rows if alike[row] == max(alike.values())]

    def trust(self, nodes: Collection[str]) -> None:
        """These hosts hold the run's state; all others are newcomers."""
        self.newcomers = frozenset(self.hosts).difference(nodes)

    def place_of(self, node_id: str) -> str:
        """Where a node is, in words for the operator."""
        stage = f"stage {self.stage_of(node_id)}"
        return stage if self.rows == 1 else f"{stage} of row {self.replica_of(node_id)}"

    def may_fetch(self, node_id: str, part: BatchPart) -> bool:
        """Whether a node's stage uses this part of the samples.

        Of any groups: the row may have lost a group since the node asked for its samples.
        """
        stage = self.loss_stage if part is BatchPart.LABELS else 0
        return node_id in self._seats and (part is BatchPart.DOCUMENTS or self.stage_of(node_id) == stage)

    def needs_state(self, node_id: str, step: int) -> bool:
        """Whether the epoch waits for this node to load the state of `step`."""
        return self.phase is Phase.RESTORING and step == self.step and node_id in self._seats

    def loads(self, node_id: str) -> bool:
        """Whether a host has to fetch the state that all restore. It does not if it said that it holds it."""
        placed = self._placed.get(node_id)
        return placed is None or (self.step, self.lineage) not in self._reachable(placed)

    def _extra(self, node_id: str) -> tuple[int, ...]:
        """The groups of another row that this node computes in the step that runs."""
        return () if self.audit is None else self.audit.extra(self.replica_of(node_id))

    @property
    def asked(self) -> tuple[str, ...]:
        """The nodes for which the phase waits."""
        return self.speakers if self.phase is Phase.VALIDATING else self.hosts

    def _is_asked(self, node_id: str) -> bool:
        return self.phase is not Phase.VALIDATING or node_id in self.speakers

    # ---- what goes out

    def announce(self) -> list[Action]:
        return [Send(node_id=node, message=self._placement(node)) for node in self.hosts]

    def begin(self, *, keep_sums: bool = False, seated: Collection[str] = ()) -> list[Action]:
        """Open the step. Call in `IDLE` only.

        Args:
            keep_sums: nodes keep its summed gradients.
            seated: nodes that entered, whose links are open, and that hold the state or are told how to get
                it. They have their seats from now on.
        """
        self._follows_commit = self.phase is Phase.APPLYING
        self._late.clear()
        if self.fresh or seated:
            self.fresh.clear()
            self._seat(seated)
        self.phase = Phase.STEPPING
        self._rules.history.begins(self.step)
        # All stages must run the step with the same windows, also one that receives it again.
        self._windows = self.planned_windows
        self._keeps_sums = keep_sums
        self._drop_votes()
        self._complete.clear()
        self._known_losses = {}
        self._handed = HandedGroups()
        self.audit = None
        self._shared = self._share()
        if not self.uncompressed:
            new = [row for row in self.whole_rows if row not in self.proven_rows]
            groups = tuple(map(self.groups_of, range(self.rows)))
            self.audit = self._rules.auditor.draw(self.step, groups, self.kinds, new)
        self._has_digests = self.audit is not None or self._rules.auditor.is_on
        if self.audit is not None or self.fresh or len(self.whole_rows) < self.rows:
            self._note_uneven()
        return [*map(self._filled, seated), *self._tell_work()]

    def apply(self) -> list[Action]:
        """Have all stages apply the commit; nothing begins with it. Call in `APPLYING` only."""
        return self._to_asked(self._commit())

    def go_on(self, *, keep_sums: bool = False, seated: Collection[str] = ()) -> list[Action]:
        """Instead of `apply`, open the next step together with this commit. A vote for the next step then
        confirms that the commit was applied. Arguments are those of `begin`."""
        done = StepDone(epoch=self.number, step=self.step, nodes=self.hosts)
        self.step += 1
        self.steps_done += 1
        return [*self.begin(keep_sums=keep_sums, seated=seated), done]

    def pause(self) -> None:
        """The run is between two steps, though this one is not done: its stages may have to end before."""
        self.phase = Phase.IDLE

    def _seat(self, nodes: Collection[str]) -> None:
        """Give entering nodes their seats."""
        self._linked.difference_update(nodes)
        for node in nodes:
            at = self.entering.pop(node)
            self.grid[at], self._seats[node] = node, at
            self.fresh.add(node)
            self.generation += 1
        self._count_hosts()

    def _count_hosts(self) -> None:
        """Seats have changed."""
        self.hosts = tuple(node for node in self.grid if node)
        rows = map(self.row, range(self.rows))
        self.whole_rows = [number for number, row in enumerate(rows) if all(row)]

    # ---- seats that change hands while steps go on

    def enter(self, node_id: str, seat: Seat, address: str, kind: Hashable, now: float) -> list[Action]:
        """A node that follows the run is to have an empty seat: it and its neighbours open links."""
        at = seat.row * self.stages + seat.stage
        assert not self.grid[at] and at not in self.entering.values(), "the seat is empty"
        self.entering[node_id] = at
        self.entering_since[node_id] = now
        self.placed_nodes[at], self.addresses[at], self.kinds[at] = node_id, address, kind
        self._forget_rows()
        # Also those that enter: they have begun to open links to whoever had the seat.
        known = {**dict(enumerate(self.grid)), **{at: node for node, at in self.entering.items()}}
        peers = [known[seat_at] for seat_at in self._linked_seats(seat)]
        sends = [self._renews(node, seat) for node in peers if node]
        places = [place for row in self._rows for place in row]
        offered = SeatOffered(
            nodes=tuple(place.node_id for place in places),
            addresses=tuple(place.address for place in places),
            rows=self.rows,
        )
        return [
            offered,
            *sends,
            Send(node_id=node_id, message=replace(self._placement(node_id), enters=True)),
        ]

    def emptied(self, seat: Seat, *, was_offered: bool = False) -> list[Action]:
        """A seat is empty now: nodes with a link to it drop that, and do not wait for it to open. Within a
        step hosts hear of it with their new work, unless the node that is gone was only about to have the
        seat."""
        near, linked = self._linked_seats(seat), self.entering
        if was_offered or self.phase is not Phase.STEPPING:
            linked = {**linked, **self._seats}
        return [self._renews(node, seat) for node, at in linked.items() if at in near]

    def _linked_seats(self, seat: Seat) -> list[int]:
        """Seats whose nodes have links to the node of this one."""
        near = [seat.row * self.stages + stage for stage in self._rules.neighbours(seat.stage, self.stages)]
        column = range(seat.stage, len(self.grid), self.stages)
        own = seat.row * self.stages + seat.stage
        return [at for at in dict.fromkeys((*near, *column)) if at != own]

    def _renews(self, node_id: str, seat: Seat) -> Action:
        """Have a node replace or drop its link to a seat."""
        return Send(node_id=node_id, message=replace(self._placement(node_id), renewed=(seat,)))

    def entrant_placed(self, node_id: str) -> list[Action]:
        """A node that enters has taken its place: it is to open its links."""
        self._linking.add(node_id)
        return [Send(node_id=node_id, message=replace(self._restore, step=self.step, missed=None))]

    def late_entrants(self, now: float, seconds: float = ENTERING_SECONDS) -> list[str]:
        """The nodes that have had this time to open their links, and have not."""
        since = self.entering_since
        waits = [node for node in self.entering if node not in self._linked]
        return [node for node in waits if now - since[node] > seconds]

    def entrant_linked(self, node_id: str) -> bool:
        """A node that enters is ready. Returns whether its links have opened. Otherwise it says so again, or
        was ready in the seat that it had before."""
        is_news = node_id in self._linking
        self._linking.discard(node_id)
        if is_news:
            self._linked.add(node_id)
        return is_news

    def entering_seat(self, node_id: str) -> Seat:
        """The seat that a node is to have."""
        return Seat(*divmod(self.entering[node_id], self.stages))

    def beside(self, node_id: str) -> dict[Seat, str]:
        """The hosts to which a node that enters is to have links, by their seats."""
        near = self._linked_seats(self.entering_seat(node_id))
        return {Seat(*divmod(at, self.stages)): self.grid[at] for at in near if self.grid[at]}

    def drop_entrant(self, node_id: str) -> list[Action]:
        """If the node enters, it does not get its seat."""
        if node_id not in self.entering:
            return []
        seat = self.entering_seat(node_id)
        del self.entering[node_id]
        self._forget_rows()
        self._linking.discard(node_id)
        self._linked.discard(node_id)
        return self.emptied(seat, was_offered=True)

    def unheard(self, node_id: str) -> None:
        """A host is about to be lost because nobody hears it; it may still live."""
        self._unheard[node_id] = self._seats[node_id], self.step

    def seat_left(self, node_id: str) -> Seat | None:
        """The seat of a node that was not heard in the step that runs, if nobody is to have it."""
        at, step = self._unheard.get(node_id, (-1, -1))
        is_free = step == self.step and not self.grid[at] and at not in self.entering.values()
        seat = Seat(*divmod(at, self.stages))
        return seat if is_free and not self.keeps_groups(seat.row) else None

    @property
    def linked(self) -> list[str]:
        """The nodes that may take their seats from the next step on."""
        return [node for node in self.entering if node in self._linked]

    def seat(self, nodes: Collection[str], now: float) -> list[Action]:
        """Give seats within the step to nodes that hold its state and whose links are open. A row that
        becomes whole gets groups that wait."""
        self._seat(nodes)
        self._late.update((Seat(*divmod(self._seats[node], self.stages)), None) for node in nodes)
        self._note_uneven()
        return [*map(self._filled, nodes), *self._shared_again(now)]

    def give(self, now: float) -> list[Action]:
        """Give groups that wait to rows that are about to need more; call it about twice a second."""
        if self.phase is not Phase.STEPPING or not self.waits:
            return []
        if not self._give(now):
            return []
        self.generation += 1
        self._drop_votes()
        return self._tell_work()

    def _filled(self, node_id: str) -> Action:
        return SeatFilled(
            epoch=self.number,
            step=self.step,
            node_id=node_id,
            row=self.replica_of(node_id),
            stage=self.stage_of(node_id),
            nodes=tuple(self.grid),
            addresses=tuple(self.addresses),
            rows=self.rows,
        )

    def _share(self) -> StepGroups:
        """Decide which row computes which groups: as placed while all rows are whole, else whole rows share
        all groups."""
        if len(self.whole_rows) == self.rows:
            return self._as_placed()
        seconds = self._seconds(self.whole_rows)
        shared = share_groups(self._group_count, [*seconds.values()])
        groups = StepGroups(dict(zip(seconds, shared, strict=True)), self.opened_at)
        groups.hold_back(seconds)
        return groups

    @property
    def all_hold_it(self) -> bool:
        """Whether every stage has the state of `step`, with no commit left to apply."""
        return all(answer.held_step == self.step for answer in self._placed.values())

    @property
    def passes_done(self) -> int:
        """Passes over held-out samples that all stages are done with, in `VALIDATING`."""
        return len(self._losses)

    @property
    def answered(self) -> Collection[str]:
        """The nodes that have answered what the phase asks of all."""
        match self.phase:
            case Phase.PLACING:
                return self._placed.keys()
            case Phase.STEPPING:
                return self.votes.keys()
            case _:
                return self._answered

    def neighbours(self, node_id: str) -> Collection[int]:
        """The stages of its row that this node's stage has links with."""
        return self._rules.neighbours(self.stage_of(node_id), self.stages)

    def ask_again(self, node_id: str) -> list[Action]:
        """Send a node what it may have missed."""
        return [Send(node_id=node_id, message=message) for message in self.outstanding(node_id)]

    def take_snapshot(self, replica: int = 0) -> list[Action]:
        """Ask one row for the state of `step`, and all others what theirs is. Call in `IDLE` or `STEPPING`
        only: then every stage holds it, or applies the commit that leads to it."""
        before = self._snapshot
        attempt = before.attempt + 1 if before is not None and before.step == self.step else 0
        self._snapshot = TakeSnapshot(epoch=self.number, step=self.step, attempt=attempt)
        self.snapshot_nodes = self.row(replica)
        others = [node for node in self.hosts if node not in self.snapshot_nodes]
        return [Send(node_id=node, message=self._take(node)) for node in (*self.snapshot_nodes, *others)]

    @property
    def taken_snapshot(self) -> TakeSnapshot:
        """The message to the nodes that hand the snapshot in. Call it only after a snapshot was taken."""
        assert self._snapshot is not None
        return self._snapshot

    def _take(self, node_id: str) -> TakeSnapshot:
        return replace(self.taken_snapshot, only_hashes=node_id not in self.snapshot_nodes)

    def validate(self, passes: Sequence[HeldOutPass], microbatch: int, label_weight: float) -> list[Action]:
        """Measure the held-out loss of the state that every stage holds. Call in `IDLE` only.

        Args:
            microbatch: samples in one.
            label_weight: of all held-out samples (`node.model.labels`).
        """
        self.phase = Phase.VALIDATING
        self._passes, self._losses = passes, []
        self._microbatch, self._label_weight = microbatch, label_weight
        self._answered.clear()
        return self._to_asked(self._validate())

    def outstanding(self, node_id: str) -> list[CoordinatorMessage]:
        """What a node may have missed while its control connection was broken. Nodes ignore what they already
        know."""
        missed: list[CoordinatorMessage] = []
        # A node that has missed the commit holds the state before it.
        oldest = self.step - (self._follows_commit and self.phase is Phase.STEPPING)
        taken = self._snapshot is not None and self._snapshot.step >= oldest
        if self._snapshot is not None and taken:
            missed.append(self._take(node_id))
        match self.phase:
            case Phase.PLACING:
                return [self._placement(node_id)]
            case Phase.RESTORING:
                # Others may have died since it was placed: it does not wait for links to them.
                vacant = tuple(self.vacant)
                drops = [replace(self._placement(node_id), renewed=vacant)] if vacant else []
                return [*drops, self._restore]
            case Phase.STEPPING:
                missed.append(self._step_message(node_id))
            case Phase.APPLYING:
                missed.append(self._commit())
            case Phase.VALIDATING if node_id in self.asked:
                missed.append(self._validate())
            case _:
                pass
        return missed

    # ---- what comes in

    def placed(self, node_id: str, placed: Placed) -> bool:
        """A host says what it holds. Returns whether all have, so that `restore` is next."""
        if self.phase is not Phase.PLACING or node_id not in self._seats:
            return False
        self._placed[node_id] = placed
        return self.choose_state()

    def choose_state(self) -> bool:
        """Choose the state that the epoch begins with, once all hosts have said what they hold. Returns
        whether this call has chosen it."""
        if self.phase is not Phase.PLACING or len(self._placed) < len(self.hosts):
            return False
        # Stages that can agree go on from where they are; otherwise all go back to what is on disk,
        # which starts a new lineage: with other stages or links the same steps may end in other bits.
        reachable = {node: self._reachable(answer) for node, answer in self._placed.items()}
        common = set.intersection(*reachable.values())
        self.step, self.lineage = max(common, default=(-1, 0))
        columns = [set.union(*(reachable[node] for node in self.column(s))) for s in range(self.stages)]
        shared = set.intersection(*columns)
        newest = max((state for state in shared if self._is_backed(state, reachable)), default=(-1, 0))
        if newest > (self.step, self.lineage) and newest[0] > self._record.newest_snapshot:
            self.behind = [node for node, states in reachable.items() if newest not in states]
        if self.step < self._record.newest_snapshot:
            self.step, self.lineage = self.loaded = self._record.newest_snapshot, self.number
        missed = self.committed is not None and self.committed.step == self.step - 1
        self.uncompressed = self.step == self._record.suspect_step
        self._restore = Restore(
            epoch=self.number,
            step=self.step,
            missed=self._commit() if missed else None,
            uncompressed=self.uncompressed,
            lineage=self.lineage,
        )
        self.phase = Phase.RESTORING
        self._answered.clear()
        return True

    def _is_backed(self, state: State, reachable: Mapping[str, Collection[State]]) -> bool:
        """Whether more nodes of each stage hold this state than hold one that is as new, and not the same.

        Else a node that names another lineage would go on without all others.
        """
        for stage in range(self.stages):
            held = [reachable[node] for node in self.column(stage)]
            same = sum(state in states for states in held)
            as_new = sum(any(step >= state[0] for step, _ in states) for states in held)
            if same <= as_new - same:
                return False
        return True

    def restore(self) -> list[Action]:
        """Have all stages load the state that the epoch begins with."""
        return self._to_asked(self._restore)

    def use_codecs(self, plan: CodecPlan) -> None:
        """Restore with these codecs on the links. Call between `placed` and `restore`."""
        self.codecs = plan
        self._restore = replace(
            self._restore, activation_codecs=plan.activations, gradient_codecs=plan.gradients
        )

    @property
    def storage_names(self) -> tuple[str, ...]:
        """The storage of each stage, as nodes are told; empty if the coordinator does not choose it."""
        return self._restore.storages

    def storage_seconds(self, stage: int) -> list[Mapping[str, float]]:
        """What the stage's nodes, one per row, reported about the storages that fit on them
        (`Placed.storages`)."""
        return [self._placed[node].storages for node in self.column(stage)]

    def use_storages(self, plan: StoragePlan) -> None:
        """Restore with activations stored like this; as `use_codecs`."""
        self.storages = plan
        self._restore = replace(self._restore, storages=plan.names)

    def ready(self, node_id: str) -> list[Action]:
        return self._restored() if self._all_answered(node_id, Phase.RESTORING) else []

    def _restored(self) -> list[Action]:
        self.phase = Phase.IDLE
        nodes = tuple(self.grid)
        return [RecordRestored(epoch=self.number, step=self.step, nodes=nodes, groups=self.groups)]

    def vote(self, node_id: str, vote: Vote) -> Outcome:
        """Take a vote. Returns the outcome once all hosts have voted. After a commit, call `apply` or
        `go_on`."""
        if self.phase is not Phase.STEPPING or vote.step != self.step or node_id not in self._seats:
            return []
        if not self._votes_from <= vote.generation <= self.generation or self.waits:
            return []  # the node is about to hear that it has other work
        groups = self.groups_of(self.replica_of(node_id)) if self._group_count > 1 else None
        stage, has_loss = self.stage_of(node_id), self.stage_of(node_id) == self.loss_stage
        own = groups if groups is not None and self.rows > 1 else ()
        why = self._rules.history.refusal(
            vote, stage, self.stages, groups, has_rows=self.rows > 1
        ) or self._rules.auditor.refusal(
            vote,
            stage,
            self.stages,
            own if self._has_digests else (),
            self._extra(node_id),
            has_loss=has_loss,
        )
        if why is not None:
            return RefusedVote(node_id, why)
        for unit, norm in vote.norms.items():
            if not 0.0 <= norm < math.inf and not self._may_overflow:
                return NonFinite(node_id, f"the gradient of layer unit {unit}")
        for loss in (vote.loss, *vote.group_losses.values()):
            if loss is not None and not math.isfinite(loss):
                return NonFinite(node_id, "the loss")
        self.votes[node_id] = vote
        self._complete.add(node_id)
        if len(self.votes) < len(self.hosts):
            return []
        return self._commit_step()

    def handed_over(self, node_id: str, message: HandedOver, now: float) -> Outcome:
        """A node does not need to be there any more for these groups of its row."""
        if self.phase is not Phase.STEPPING or message.step != self.step or node_id not in self._seats:
            return []
        stage, groups = self.stage_of(node_id), set(message.groups)
        wanted = groups if stage == self.loss_stage else set()
        if message.group_losses.keys() != wanted:
            return RefusedVote(node_id, "it handed over groups with the losses of others")
        if max((*groups, *message.passed_on), default=0) >= self._group_count:
            return RefusedVote(node_id, "it handed over groups that the run does not have")
        if message.generation > self.generation or not self._hands_over:
            return RefusedVote(node_id, "it handed over groups that nobody asked it for")
        # A node sends sums of several groups as a whole, so the others of its row have no part of one.
        if any(0 < len(groups.intersection(span)) < len(span) for span in self._sent_as_one(node_id)):
            return RefusedVote(node_id, "it handed over part of a sum")
        self._handed.said(node_id, stage, message)
        own = self.groups_of(self.replica_of(node_id))
        if own and groups and self._handed.kept_without(node_id, (), own) >= set(own):
            since = self.given_at(node_id) or self.opened_at
            self._rules.handed_over(node_id, (now - since) / len(own))
        return []

    def _sent_as_one(self, node_id: str) -> list[range]:
        """The groups of a node's row, as it sends their sums."""
        runs = self._shared.runs_of(self.replica_of(node_id))
        return [span for groups in runs for span in self._sums_of(groups)]

    def missed(self, node_id: str, message: SumsMissing, now: float) -> list[Action] | None:
        """A node did not get sums that a row's last node of its stage had handed over, so the row loses the
        groups that it has kept. None if no row may compute them again."""
        if self.phase is not Phase.STEPPING or message.step != self.step or node_id not in self._seats:
            return []
        row, stage = message.replica, self.stage_of(node_id)
        if not self._handed.keeps(row, stage):
            return []
        if not self._shared.can_give(self.whole_rows, self.groups_of(row)):
            return None
        self.generation += 1
        self._lose_groups({row: self.groups_of(row)}, stage)
        return self._shared_again(now)

    def was_uneven(self, step: int) -> bool:
        """Whether rows computed other groups than they were placed with in this one of the newest steps."""
        return step in self._uneven

    def computed(self, step: int) -> Sequence[int]:
        """How many groups each row computed in a committed step that `was_uneven`; 0 for rows that had other
        nodes before. Empty for steps long ago."""
        return self._uneven.get(step, ())

    def _counts(self) -> tuple[int, ...]:
        """As `computed`, for the step that runs."""
        entered, audit = {seat.row for seat in self._late}, self.audit
        counts = [0] * self.rows
        for row in self.whole_rows:
            if row not in entered and not self._shared.has_lost(row):
                counts[row] = len(self.groups_of(row)) + len(() if audit is None else audit.extra(row))
        return tuple(counts)

    @property
    def has_more_auditors(self) -> bool:
        """Whether a row that has not computed the audited group could."""
        if self.audit is None:
            return False
        alike = rows_alike(self.kinds, self.rows)[self.audit.rows[0]]
        return len(self.audit.rows) == 2 and len(alike) > 2

    def commit_unaudited(self) -> Outcome:
        """Go on although nodes computed different values: nobody can say which of them is wrong."""
        self.audit = None
        return self._commit_step()

    def commit_anyway(self, *, confirmed: bool) -> list[Action]:
        """Commit votes that are not plausible. `confirmed` says that other nodes computed the same values."""
        outcome = self._commit_step(anyway=True, confirmed=confirmed)
        assert isinstance(outcome, list), "only plausibility was in question"
        return outcome

    def can_lose(self, node_id: str) -> bool:
        """Whether the epoch goes on without this host: in any phase, if a row is whole without it.

        If none is, the epoch ends. Survivors that hold all stages together make whole rows of the next one,
        which a step could not go on without.
        """
        row = self.replica_of(node_id)
        others = [other for other in self.whole_rows if other != row]
        if self.uncompressed or not others:
            return False
        if self.phase is not Phase.STEPPING:
            return True
        lost = self._lost_with(node_id)
        able = [other for other in others if other not in lost]
        return self._shared.can_give(able, [group for groups in lost.values() for group in groups])

    def _lost_with(self, node_id: str) -> dict[int, list[int]]:
        """The groups of the step that are lost with a node, by row. Its own row is among these."""
        row, stage = self.replica_of(node_id), self.stage_of(node_id)
        is_complete = self._is_complete_without(node_id)
        kept = set[int]()
        if is_complete or not self._handed.keeps(row, stage):
            kept = self._kept_without(node_id, is_complete) - self._to_compare(node_id)
        at_risk = () if is_complete else self._handed.at_risk(node_id, stage, self.groups_of)
        lost = {other: [*self.groups_of(other)] for other in at_risk}
        return {**lost, row: [group for group in self.groups_of(row) if group not in kept]}

    def _is_complete_without(self, node_id: str) -> bool:
        """Whether each other node of this node's stage has all sums, so that none is lost with it. Nodes that
        have come within the step do not count: they get the sums from the others."""
        stage = self.stage_of(node_id)
        others = [
            node
            for row, node in enumerate(self.grid[stage :: self.stages])
            if node not in ("", node_id) and Seat(row, stage) not in self._late
        ]
        return bool(others) and self._complete.issuperset(others)

    def _kept_without(self, node_id: str, is_complete: bool) -> set[int]:
        row = self.replica_of(node_id)
        # A mate that has voted on the present work has computed all of it.
        mates = [mate for mate in self.row(row) if mate not in ("", node_id) and mate not in self.votes]
        if not is_complete:
            return self._handed.kept_without(node_id, mates, self.groups_of(row))
        kept = self._handed.computed(mates, self.groups_of(row))
        if self.stage_of(node_id) == self.loss_stage:  # its losses must be known, too
            vote = self.votes.get(node_id)
            kept &= self._handed.losses(node_id).keys() | (
                set() if vote is None else vote.group_losses.keys()
            )
        return kept

    def _to_compare(self, node_id: str) -> set[int]:
        """The groups of a node's row that do not count without the row's audit, which its death ends.

        They are the sum with the group that would have been compared. Other groups of the row count as they
        do in steps without an audit, unless its nodes are new, or the step runs again because of a
        difference.
        """
        row, audit, auditor = self.replica_of(node_id), self.audit, self._rules.auditor
        if audit is None or row not in audit.rows:
            return set()
        is_doubted = auditor.doubted is not None and auditor.doubted[0] == self.step
        if row not in self.proven_rows or is_doubted:
            return set(self.groups_of(row))
        if not auditor.is_on or row != audit.rows[0]:
            return set()
        return {group for span in self._sent_as_one(node_id) if audit.group in span for group in span}

    def loses_groups(self, node_id: str) -> bool:
        """Whether groups of the step have to be computed again if a node leaves its seat."""
        return any(self._lost_with(node_id).values())

    def seat_lost(self, node_id: str, reason: str) -> SeatLost:
        """What is reported about a host that the epoch is about to `lose`."""
        row, groups = self.replica_of(node_id), list[int]()
        if self.phase is Phase.STEPPING:
            lost = self._lost_with(node_id)
            groups += self.groups_of(row)
            groups += [group for other in lost if other != row for group in lost[other]]
        return SeatLost(
            epoch=self.number,
            step=self.step,
            node_id=node_id,
            row=row,
            stage=self.stage_of(node_id),
            reason=reason,
            groups=tuple(groups),
            portions=self.portions,
        )

    def lose(self, node_id: str, now: float) -> Outcome:
        """Go on without a host that is gone, and that the epoch `can_lose`.

        Within a step, returns the outcome if all other hosts have voted. Otherwise whole rows compute the
        groups of its row. Before the first step, returns what follows if all others have restored; in
        `PLACING`, call `choose_state`.
        """
        asked = self.asked
        lost = self._lost_with(node_id) if self.phase is Phase.STEPPING else {}
        vote = self.votes.pop(node_id, None)
        at = self._seats.pop(node_id)
        self.grid[at] = ""
        self._late.pop(Seat(*divmod(at, self.stages)), None)
        self._forget_rows()
        self.fresh.discard(node_id)
        self._complete.discard(node_id)
        self.newcomers = self.newcomers.difference([node_id])
        self._count_hosts()
        self.generation += 1
        self._answered.discard(node_id)
        self._placed.pop(node_id, None)
        match self.phase:
            case Phase.RESTORING if len(self._answered) == len(self.hosts):
                return self._restored()
            case Phase.STEPPING:
                return self._work_lost(node_id, Seat(*divmod(at, self.stages)), vote, lost, now)
            case Phase.APPLYING if len(self._answered) == len(self.hosts):
                return self._step_applied()
            case Phase.VALIDATING if node_id in asked:
                self._answered.clear()
                self._losses.clear()
                return self._to_asked(self._validate())
            case _:
                return []

    def _work_lost(
        self, node_id: str, seat: Seat, vote: Vote | None, lost: Mapping[int, Sequence[int]], now: float
    ) -> Outcome:
        """The node of this seat is gone in the step, after its vote if it gave one. `lost`: as
        `_lost_with`."""
        row = seat.row
        # A node that has voted keeps all sums, so its vote counts as long as the groups stay where they are.
        votes_stay = not self.waits and not any(lost.values())
        if self.audit is not None and row in self.audit.rows:
            self.audit = None
            votes_stay = False  # they have digests that nobody asks for any more
        self._note_uneven()
        self._keeps_sums = True  # of the work that all are told of now
        if len(self.votes) == len(self.hosts):
            # All sums are complete, and so is what is known of the loss, unless that was for it to say.
            self._known_losses.update({} if vote is None else vote.group_losses)
            if len({**self._known_losses, **self._group_losses()}) == self._group_count:
                return self._commit_step()
        column = self.column(seat.stage)
        losses = {} if vote is None else dict(vote.group_losses)
        losses |= self._handed.node_lost(node_id, seat.stage, column, self.generation)
        self._lose_groups(lost, seat.stage)
        self._known_losses.update((group, losses[group]) for group in self.groups_of(row) if group in losses)
        if not votes_stay:
            return self._shared_again(now)
        return self._commit_step() if len(self.votes) == len(self.hosts) else self._tell_work()

    def _shared_again(self, now: float) -> list[Action]:
        """Give groups that wait to whole rows, and have all nodes vote on the new work."""
        self._give(now)
        self._drop_votes()
        return self._tell_work()

    def _drop_votes(self) -> None:
        self.votes.clear()
        self._votes_from = self.generation

    def _give(self, now: float) -> bool:
        """Give groups that wait to whole rows that need them; whether any got some."""
        audited = () if self.audit is None else self.audit.rows[1:]
        return self._shared.give(self._seconds(self.whole_rows), now, audited)

    def _lose_groups(self, lost: Mapping[int, Sequence[int]], stage: int) -> None:
        """Rows lose groups, each because it has lost its node of this stage, and keep their others."""
        for row, groups in lost.items():
            kept = set(self.groups_of(row)).difference(groups)
            self._shared.lose(row, kept)
            if kept:
                self._handed.keep(row, stage)
            else:
                self._handed.lose(row)
            for group in groups:
                self._known_losses.pop(group, None)

    def _note_uneven(self) -> None:
        if self.step not in self._uneven:
            self._uneven[self.step] = ()
            if len(self._uneven) > REMEMBERED_AUDITS:
                del self._uneven[min(self._uneven)]

    def applied(self, node_id: str, step: int) -> list[Action]:
        if step != self.step or not self._all_answered(node_id, Phase.APPLYING):
            return []
        return self._step_applied()

    def _step_applied(self) -> list[Action]:
        step, self.phase = self.step, Phase.IDLE
        self.step += 1
        self.steps_done += 1
        return [StepDone(epoch=self.number, step=step, nodes=self.hosts)]

    def validated(self, node_id: str, message: Validated) -> list[Action] | RefusedVote:
        """A pass is done: begins the next one, or ends with `RecordHeldOut`."""
        current = self._validate() if self.phase is Phase.VALIDATING else None
        if current is None or (message.step, message.number) != (current.step, current.number):
            return []
        if message.loss is not None and message.loss < 0:
            return RefusedVote(node_id, "it measured a held-out loss below 0")
        if message.loss is not None and node_id == self.speakers[self.loss_stage]:
            self._loss = message.loss
        if not self._all_answered(node_id, Phase.VALIDATING):
            return []
        self._answered.clear()
        self._losses.append(self._loss * self._label_weight)
        self._loss = math.nan
        if len(self._losses) < len(self._passes):
            return self._to_asked(self._validate())
        self.phase = Phase.IDLE
        mean, labelled = pass_losses(self._passes, self._losses), self._label_weight > 0
        return [
            RecordHeldOut(
                step=self.step,
                loss=mean.as_trained if labelled else None,
                uncompressed=mean.uncompressed if labelled else math.nan,
                samples=self._microbatch * mean.microbatches,
            )
        ]

    # ---- inside

    def _validate(self) -> Validate:
        held_out = self._passes[len(self._losses)]
        return Validate(
            epoch=self.number, step=self.step, number=held_out.number, microbatches=held_out.microbatches
        )

    @property
    def _hands_over(self) -> bool:
        """Whether nodes hand over what they compute in the running step."""
        lost_at = self.seat_lost_at
        return self.rows > 1 and lost_at is not None and self.step - lost_at <= HANDING_STEPS

    @property
    def _may_overflow(self) -> bool:
        """Whether the loss is scaled so that gradients of the step that runs may become infinite."""
        return self._rules.scales is not None and self._rules.scales.overflows(self.step)

    def _commit_step(self, *, anyway: bool = False, confirmed: bool = False) -> Outcome:
        odd_nodes = [
            node
            for node, vote in self.votes.items()
            if not all(0.0 <= norm < math.inf for norm in vote.norms.values())
        ]
        if odd_nodes and self._may_overflow:
            return Overflow(tuple(odd_nodes))
        columns = [self.column(stage) for stage in range(self.stages)]
        if (odd := disagreement(self.votes, columns) or self._audit_step()) is not None:
            return odd
        loss = self._step_loss()
        factor = 1.0 if self._rules.scales is None else self._rules.scales.at(self.step).factor
        votes = [unscaled(self.votes[node], factor) for node in self.speakers]
        counted_loss = None if math.isnan(loss) else loss
        votes[self.loss_stage] = replace(votes[self.loss_stage], loss=counted_loss)
        norms = {unit: norm for vote in votes for unit, norm in vote.norms.items()}
        grad_norm = global_norm(norms[unit] for unit in sorted(norms))
        if not math.isfinite(grad_norm):
            largest = max(range(len(votes)), key=lambda stage: sum(votes[stage].norms.values()))
            return NonFinite(self.speakers[largest], "the global gradient norm")
        if self.uncompressed:
            return FiniteUncompressed()
        # Of a step without labels every gradient is 0, which says nothing of other steps.
        judged = norms if counted_loss is not None else {}
        if (
            judged
            and self.is_proving
            and (found := self._rules.history.not_reproduced(self.step, columns, votes, self._loss_parts()))
        ):
            what, node_id = found
            return NotReproduced(what, self.loaded[0], node_id)
        if (
            judged
            and not anyway
            and (doubt := self._rules.history.implausible(self.speakers, votes, self._loss_parts()))
            is not None
        ):
            return doubt
        self._rules.history.committed(self.step, judged, loss, confirmed=confirmed)
        clip, lr = self._rules.plan(self.step, grad_norm)
        line = self._rules.history.clipped(clip, norms, self.speakers)
        record = self._committed(loss, grad_norm, clip / factor, lr, norms)
        return [record] if line is None else [record, Announce(text=line)]

    def skip_step(self) -> list[Action]:
        """After an `Overflow`, commit the step as skipped: no stage applies it, because the loss's scale was
        too large."""
        loss = self._step_loss()
        self._rules.history.committed(self.step, {}, loss, confirmed=False)
        _, lr = self._rules.plan(self.step, 0.0)
        record = self._committed(loss, math.inf, SKIPPED, lr, {})
        assert self._rules.scales is not None, "only a scaled loss overflows"
        return [record, Announce(text=self._rules.scales.words(self.step))]

    def _committed(
        self, loss: float, grad_norm: float, clip: float, lr: float, norms: Mapping[int, float]
    ) -> RecordCommit:
        if self._rules.scales is not None:
            self._rules.scales.committed(self.step, skipped=clip == SKIPPED)
        self.committed = Committed(step=self.step, clip_coefficient=clip, lr=lr, lineage=self.lineage)
        self.phase = Phase.APPLYING
        if self.step in self._uneven:
            self._uneven[self.step] = self._counts()
        self._answered.clear()
        return RecordCommit(
            epoch=self.number,
            step=self.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            clip_coefficient=clip,
            norms=norms,
        )

    def _audit_step(self) -> Difference | Contradiction | None:
        if self.audit is None:
            return None
        rows = {row: [(node, self.votes[node]) for node in self.row(row)] for row in self.audit.rows}
        return self._rules.auditor.compare(self.audit, self.step, rows, self.loss_stage)

    def _step_loss(self) -> float:
        if self.step in self._rules.unlabelled:
            return math.nan
        only = self.votes[self.speakers[self.loss_stage]].loss
        return summed_loss({**self._known_losses, **self._group_losses()}) if only is None else only

    def _loss_parts(self) -> dict[str, Collection[float]]:
        """The losses of groups by the node that reported them; those of nodes that are gone by ""."""
        gone = {"": self._known_losses.values()}
        return gone | {node: self.votes[node].group_losses.values() for node in self.column(self.loss_stage)}

    def _group_losses(self) -> dict[int, float]:
        """The losses by gradient group, in the votes so far."""
        votes = [self.votes[node] for node in self.column(self.loss_stage) if node in self.votes]
        return {group: loss for vote in votes for group, loss in vote.group_losses.items()}

    def _reachable(self, placed: Placed) -> set[State]:
        """The (step, lineage) of the states that a stage can be at without fetching anything.

        A state that no commit on record leads to is not the run's, whoever claims to hold it, and neither is
        one of a lineage that the run has left.
        """
        held, lineage, committed = placed.held_step, placed.lineage, self.committed
        known_lineages = self._record.lineages
        if lineage in self._record.left or (known_lineages is not None and lineage not in known_lineages):
            return set()
        states = {(held, lineage)} if 0 <= held <= self._newest_state else set()
        known = committed is not None and committed.step == held and committed.lineage in (None, lineage)
        if placed.voted and known:
            states.add((held + 1, lineage))
        return states

    def _all_answered(self, node_id: str, phase: Phase) -> bool:
        if self.phase is not phase or node_id not in self._seats or not self._is_asked(node_id):
            return False
        self._answered.add(node_id)
        return len(self._answered) == len(self.asked)

    def _step_message(self, node_id: str) -> Begin | Commit:
        """The message with which a node begins the current step."""
        ((_, message),) = self._step_messages([node_id])
        return message

    def _step_messages(self, nodes: Iterable[str]) -> Iterator[tuple[str, Begin | Commit]]:
        """The message with which each of these nodes begins the current step. Nodes whose messages are equal
        get the same object, which is encoded once."""
        begin = Begin(
            epoch=self.number,
            step=self.step,
            keep_sums=self._keeps_sums,
            digests=self._has_digests and not self._rules.auditor.is_on,
            loss_scale=0.0 if self._rules.scales is None else self._rules.scales.at(self.step).factor,
            generation=self.generation,
            portions=() if self._shared.runs == self._placed_runs else self.portions,
            absent=tuple(self.vacant),
            late=tuple(self._late),
            hands_over=self._hands_over,
        )
        links = len(self._windows) // self.rows
        known: dict[Hashable, Begin | Commit] = {}
        for node in nodes:
            first = self.replica_of(node) * links
            windows, extra = self._windows[first : first + links], self._extra(node)
            # A new node has applied the commit as one that follows.
            tells_commit = self._follows_commit and node not in self.fresh
            kind = windows, extra, tells_commit
            if kind not in known:
                own = replace(begin, link_windows=windows, audited=extra)
                known[kind] = replace(self._commit(), then=own) if tells_commit else own
            yield node, known[kind]

    def _commit(self) -> Commit:
        last = self.committed
        assert last is not None, "called only when there is one"
        return Commit(epoch=self.number, step=last.step, clip_coefficient=last.clip_coefficient, lr=last.lr)

    @functools.cached_property
    def _rows(self) -> tuple[tuple[PlacedStage, ...], ...]:
        taken = {*self._seats.values(), *self.entering.values()}
        places = [
            PlacedStage(node_id=node, address=address) if at in taken else PlacedStage(node_id="", address="")
            for at, (node, address) in enumerate(zip(self.placed_nodes, self.addresses, strict=True))
        ]
        return tuple(tuple(places[row * self.stages :][: self.stages]) for row in range(self.rows))

    @functools.cached_property
    def _columns(self) -> tuple[tuple[PlacedRow, ...], ...]:
        """For each stage, its node in each row. The result is kept, because hundreds of nodes of a large run
        are told when a seat gets a new node."""
        rows = [*zip(self._rows, self.groups, strict=True)]
        return tuple(
            tuple(PlacedRow(node=places[stage], groups=groups) for places, groups in rows)
            for stage in range(self.stages)
        )

    def _forget_rows(self) -> None:
        """Seats have other nodes now."""
        for kept in ("_rows", "_columns"):
            self.__dict__.pop(kept, None)

    def _placement(self, node_id: str) -> Placement:
        replica, stage = divmod(self._seats.get(node_id, self.entering.get(node_id, 0)), self.stages)
        return Placement(
            epoch=self.number,
            stage=stage,
            stages=self._rows[replica],
            replica=replica,
            rows=self._columns[stage] if self._group_count > 1 else (),
        )

    def _tell_work(self) -> list[Action]:
        """Have all nodes begin the current step or, within it, their new work."""
        nodes = sorted(self.hosts, key=self.stage_of)  # first stages first: the others wait for them
        return [Send(node_id=node, message=message) for node, message in self._step_messages(nodes)]

    def _to_asked(self, message: CoordinatorMessage) -> list[Action]:
        return [Send(node_id=node, message=message) for node in self.asked]


class EpochSeries:
    """The epochs of a run, at most one at a time."""

    def __init__(self, rules: StepRules, *, last_number: int, committed: Committed | None) -> None:
        """`last_number` and `committed`: of the newest epoch and the newest commit on record."""
        self._rules = rules
        self.current: Epoch | None = None
        self.ended: Epoch | None = None
        """The newest that is over."""
        self._last_number = last_number
        self._record = OnRecord(
            committed=committed, newest_state=committed.step + 1 if committed is not None else 0
        )
        """The lineages in it are that of the newest commit, and those that began since."""
        self._windows: tuple[int, ...] = ()
        """The newest plan for the links; empty before there is one."""
        self._windows_of = (0, 0)
        """Nodes and rows that it was made for."""
        self._began = 0.0

    @property
    def begun(self) -> bool:
        """Whether the run has had an epoch, in this process or an earlier one."""
        return self._last_number > 0

    def begin(
        self, assignment: Assignment, *, newest_snapshot: int, suspect_step: int | None, now: float
    ) -> Epoch:
        """The next epoch. Its nodes are about to receive their places."""
        self._last_number += 1
        self._began = now
        record, ended = self._record, self.ended
        if record.lineages is not None and ended is not None and ended.lineage is not None:
            self._record = record = replace(record, lineages={*record.lineages, ended.lineage})
        same = self._windows_of == (len(assignment.hosts), len(assignment.groups))
        self.current = Epoch(
            self._last_number,
            assignment,
            replace(
                record,
                newest_snapshot=newest_snapshot,
                suspect_step=suspect_step,
                seat_lost_at=None if ended is None else ended.seat_lost_at,
                loaded=record.loaded if ended is None else ended.loaded,
            ),
            self._rules,
            windows=self._windows if same else (),
        )
        return self.current

    def leave(self) -> None:
        """No later epoch goes on from what the current one's nodes hold."""
        if self.current is not None and self.current.lineage is not None:
            self._record = replace(self._record, left={*self._record.left, self.current.lineage})

    def end(self) -> Epoch | None:
        """The epoch is over; gives it, if there is one."""
        over, self.current = self.current, None
        self.ended = over or self.ended
        return over

    def committed(self, committed: Committed) -> None:
        """A step of the epoch is committed."""
        self._record = replace(
            self._record,
            committed=committed,
            lineages=None if committed.lineage is None else {committed.lineage},
            newest_state=max(self._record.newest_state, committed.step + 1),
        )

    def plan_windows(self, number: int, windows: tuple[int, ...]) -> None:
        """If this epoch is on: its next step has these windows, and later epochs of as many stages too."""
        if self.current is not None and self.current.number == number:
            self._windows = windows
            self.current.planned_windows = windows
            self._windows_of = len(self.current.hosts), self.current.rows

    def unplaced(self, now: float, prepared: Mapping[str, float]) -> dict[str, str]:
        """The nodes that should have taken their places by now and have not, with a line for each.

        `prepared`: when each last said that it still prepares.
        """
        epoch, waited = self.current, now - self._began
        if epoch is None or epoch.phase is not Phase.PLACING or waited <= PLACING_SECONDS:
            return {}
        late = {}
        for node in epoch.hosts:
            prepares = now - prepared[node] <= PLACING_SECONDS
            if node not in epoch.answered and (not prepares or waited > PREPARING_SECONDS):
                seconds = PREPARING_SECONDS if prepares else PLACING_SECONDS
                late[node] = f"it did not take its place within {seconds:g} s: start it again"
        return late
