"""Newcomers follow the run's steps while it goes on, and fill empty seats of the grid. Pure.

When nodes are here for empty seats, or a seat has just become empty, a snapshot is taken. Each newcomer
loads its stage from it, then applies the steps that the run commits meanwhile, from the summed gradients that
the stage's nodes keep. Its links are opened while it follows. It has its seat once it is at most
`MOST_BEHIND` steps behind, and no other node waits for it. A node of another broken row already holds the
state, so it moves at once, within the step.

When nodes without a seat could form another row, they follow the run, too. Once all of them have caught up,
the next epoch begins with that row, whose seats are empty, and they take them.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median

from node.run_state.actions import Action, Announce, Send
from node.run_state.epoch import Epoch, Phase
from node.run_state.failures import MAX_RETRIES, Blame, transfer_seconds
from node.run_state.membership import Roster
from node.run_state.stage_assignment import Candidate, StageAssigner
from node.run_state.votes import UnitNumbers
from wire.messages import Follow, Following, FollowStep, NodeMessage, Seat

MOST_BEHIND = 1
"""How many steps a newcomer may still have to apply when it gets its seat."""
OPEN_STEPS = 8
"""For this many steps after a snapshot, nodes that come for an empty seat follow from it; later they need a
new one."""
EARLY_SECONDS = 60.0
"""Before the first step is done, newcomers enter at once for this long after the first of them."""
OPENED = 8
"""The newest newcomers by whose links others are judged."""
LATE_SECONDS, LATE_TIMES = 30.0, 4.0
"""Where another node could have its seat, a newcomer's links may take this long, or this multiple of what
links took before. Its state may take this long beyond the time for its bytes."""
ACCUSERS = 3
"""A host gives up its seat if so many newcomers say that their links to it do not open."""
MOST_STEPS = 64
"""A newcomer with this many steps to apply is too slow. It enters at a snapshot for which the others wait."""


@dataclass(kw_only=True)
class _Entry:
    """One attempt to fill empty seats."""

    snapshot: int
    """The step whose state the newcomers load."""
    open_until: int
    """Until this step, the attempt continues even without newcomers."""
    seats: dict[str, Seat] = field(default_factory=dict)
    """The seat that each newcomer is to have: an empty one, or one of a row that is not in the grid yet."""
    orders: dict[str, Follow] = field(default_factory=dict)
    """The order for each newcomer."""
    held: dict[str, int] = field(default_factory=dict)
    """The step whose state each newcomer holds, once it holds one."""
    since: dict[str, float] = field(default_factory=dict)
    """When each newcomer that is behind was seen first without a state, or with the one that it holds."""
    is_stored: bool = False
    steps: list[FollowStep] = field(default_factory=list)
    """The steps committed since the snapshot, with the norms of all stages."""

    @property
    def is_open(self) -> bool:
        """Whether the attempt goes on although nobody is in it."""
        return self.snapshot + len(self.steps) < self.open_until

    @property
    def may_extend(self) -> bool:
        """Whether more nodes may follow from the same snapshot."""
        return len(self.steps) < MOST_STEPS // 2


class Newcomers:
    """The newcomers of one run; at most one attempt to enter at a time."""

    def __init__(
        self,
        assigner: StageAssigner,
        roster: Roster,
        blame: Blame,
        units: UnitNumbers,
        sizes: Callable[[int], Sequence[int]],
        *,
        follows: bool,
    ) -> None:
        """
        Args:
            units: number of stages -> the numbers of each stage's layer units.
            sizes: number of stages -> the bytes of each stage's state.
            follows: whether summed gradients alone lead from a stage's state to the next.
        """
        self._units = units
        self._sizes = sizes
        self._assigner = assigner
        self._roster = roster
        self._blame = blame
        self._follows = follows
        self._entry: _Entry | None = None
        self.awaited = False
        """The epoch ends at the snapshot of this step, and nodes enter that could not follow."""
        self._expects = False
        """A seat has become empty: somebody may soon come for it."""
        self._keeps_on = False
        """The next epoch has one more row, and those who follow go on."""
        self._early_since: float | None = None
        """When newcomers entered for the first time before the first step was done."""
        self._moving: dict[str, Seat] = {}
        """Nodes that held a seat in the step that runs, and are to have another one in it."""
        self._slow: set[str] = set()
        """Nodes whose process could not keep up with the run, or failed as it entered."""
        self._opened: deque[float] = deque(maxlen=OPENED)
        """The seconds that the links of the newest newcomers took to open."""
        self._failed: Counter[str] = Counter()
        """How often each node failed to get a seat, since it had one last. Others come first."""
        self._refused: set[str] = set()
        """Nodes that held another state than the run's."""
        self._unlinked: dict[str, str] = {}
        """The host to which a link did not open, as each newcomer says; "" if it has named several, or was
        heeded."""

    # ---- what the machine asks

    @property
    def follow(self) -> bool:
        """Whether newcomers follow now, so that nodes keep summed gradients."""
        return self._entry is not None

    def need(self, step: int) -> bool:
        """Whether newcomers are to load the state of this step, which is not stored yet."""
        return self._entry is not None and self._entry.snapshot == step and not self._entry.is_stored

    def follows(self, node_id: str) -> bool:
        """Whether this node follows the run."""
        return self._entry is not None and node_id in self._entry.orders

    def wait_for_them(self) -> None:
        """The epoch ends once its state is on disk, and nodes enter then."""
        self.awaited = True

    def others(self, nodes: Iterable[str]) -> list[str]:
        """The nodes among these that do not follow."""
        return [node for node in nodes if self._entry is None or node not in self._entry.orders]

    def begin(self, epoch: Epoch, candidates: Sequence[Candidate], *, able: bool, due: bool) -> list[Action]:
        """Begin an attempt with the state of `epoch.step`, if there are nodes for it. Call between two
        steps, or within one whose sums are kept.

        Call `stored` once the snapshot of this step is complete. Where nodes that could enter cannot follow,
        they are `awaited` at a snapshot that is due.

        Args:
            candidates: nodes that could host a stage.
            able: whether a snapshot of this step is there or may be taken now, and steps go on.
            due: whether a snapshot is due anyway.
        """
        if (entry := self._entry) is not None and (entry.orders or epoch.vacant):
            return self.extend(epoch, candidates)
        able = able and epoch.step > 0
        seats = self._fillers(epoch, candidates)
        if able and (seats or (self._expects and epoch.vacant)):
            # Who comes a little later follows from the same state.
            self._expects = False
            self._entry = _Entry(snapshot=epoch.step, open_until=epoch.step + OPEN_STEPS)
            return self._fill(self._entry, epoch, seats)
        if due and not epoch.vacant:
            present = candidates if self._roster.connected(epoch.hosts) else ()
            self.awaited |= self._assigner.can_grow(epoch.stages, present, epoch.rows)
        return []

    def may_begin(self, epoch: Epoch, candidates: Sequence[Candidate]) -> bool:
        """Whether `begin` may find nodes for an attempt though no snapshot is due."""
        if self._entry is None and self._expects and epoch.vacant:
            return True
        return (self._entry is None or self._entry.may_extend) and bool(self._fillers(epoch, candidates))

    def rows_change(self, epoch: Epoch, candidates: Sequence[Candidate], step: int) -> tuple[str, ...] | None:
        """The grid of the next epoch, which begins with `step`. It has one more row for newcomers that have
        caught up, or lacks rows without nodes that nobody follows the run to fill. None if the rows stay.

        An epoch without a step stays, as its step may be computed again by other nodes.
        """
        if not epoch.steps_done or (self._entry is None and not epoch.vacant):
            return None
        if not self._roster.connected(epoch.hosts) or not self._assigner.holds(epoch.grid):
            return None
        if self._entry is None:
            # Steps with an empty row do not show how fast rows are.
            return None if self.may_begin(epoch, candidates) else self._assigner.without_empty_rows()
        ready = self._beyond(self._entry, epoch, step)
        rows = min(
            len([node for node in nodes if self._has_caught_up(self._entry, node, step)]) for nodes in ready
        )
        return (*epoch.grid, *[""] * (rows * epoch.stages)) if rows else None

    def rows_changed(self, epoch: Epoch, grid: Sequence[str], step: int) -> None:
        """The next epoch has this grid, as `rows_change` gave it."""
        entry = self._entry
        if entry is None or len(grid) < len(epoch.grid):
            return
        self._keeps_on = True
        for stage, nodes in enumerate(self._beyond(entry, epoch, step)):
            entry.seats.update((node, Seat(epoch.rows + at, stage)) for at, node in enumerate(nodes))

    def _beyond(self, entry: _Entry, epoch: Epoch, step: int) -> list[list[str]]:
        """By stage, the newcomers that are to have a seat beyond the grid. Those that have caught up come
        first."""
        return [
            sorted(
                (
                    node
                    for node, seat in entry.seats.items()
                    if seat.row >= epoch.rows and seat.stage == stage
                ),
                key=lambda node: not self._has_caught_up(entry, node, step),
            )
            for stage in range(epoch.stages)
        ]

    def seat_emptied(self, epoch: Epoch, seat: Seat) -> None:
        """A host is gone and the epoch goes on. A newcomer that was to have a seat beyond the grid gets this
        one. Otherwise somebody may soon come for it."""
        self._expects = True
        if self._entry is not None and (nodes := self._beyond(self._entry, epoch, epoch.step)[seat.stage]):
            self._entry.seats[nodes[0]] = seat

    def _addable(self, epoch: Epoch, candidates: Sequence[Candidate]) -> list[Seat]:
        """The seats of the rows for which there are nodes beside those for empty seats."""
        # Counted first: in most steps nobody is here for another row.
        if len(candidates) < len(epoch.grid) + epoch.stages or not epoch.steps_done:
            return []
        if not self._assigner.holds(epoch.grid):
            return []
        rows = self._assigner.fillable_rows(
            [offer for offer in candidates if offer.node_id not in self._slow]
        )
        return [Seat(row, stage) for row in range(epoch.rows, rows) for stage in range(epoch.stages)]

    def _fillers(self, epoch: Epoch, candidates: Sequence[Candidate]) -> dict[str, Seat]:
        """Nodes for empty seats, and for those of rows that could be added. Seats of the row that lacks
        fewest nodes are filled first. A node that had the stage before comes first, as its files may still be
        there; a node that ends too often, or has failed to get a seat, comes last."""
        if not self._follows or not (vacant := epoch.vacant + self._addable(epoch, candidates)):
            return {}
        known = {} if self._entry is None else self._entry.seats
        last = self._blame.unsteady(self._roster.candidates())
        last += [
            candidate for candidate in candidates if candidate not in last and self._failed[candidate.node_id]
        ]
        last.sort(key=lambda candidate: self._failed[candidate.node_id])
        usual = [candidate for candidate in candidates if candidate not in last]
        lacking = Counter(seat.row for seat in vacant)
        taken = {*known.values(), *map(epoch.entering_seat, epoch.entering)}
        busy = {*epoch.entering, *self._slow, *known}
        fillers: dict[str, Seat] = {}
        for group, had in product((usual, last), (True, False)):
            for seat in sorted(vacant, key=lambda seat: (lacking[seat.row], seat)):
                if seat in taken:
                    continue
                able = [
                    candidate
                    for candidate in group
                    if not epoch.has(candidate.node_id)
                    and candidate.node_id not in busy
                    and (not had or self._roster.stages.get(candidate.node_id) == seat.stage)
                    and self._assigner.fits(candidate, seat.stage, epoch.stages)
                ]
                if able:
                    # The smallest that fits: a larger stage may need the others.
                    node = min(able, key=lambda candidate: candidate.memory_bytes or math.inf).node_id
                    fillers[node] = seat
                    busy.add(node)
                    taken.add(seat)
        return fillers

    def opened(self, seconds: float, hosts: Collection[str]) -> None:
        """A newcomer's links to these hosts are open, after so many seconds."""
        self._opened.append(seconds)
        self._unlinked = {node: host for node, host in self._unlinked.items() if host not in hosts}

    def unlinked(self, node_id: str, host: str) -> bool:
        """A newcomer says that its link to this host does not open. Returns whether enough newcomers have
        said so for the host to be at fault. Each is heeded once, so that a few cannot drive out one host
        after another."""
        if self._unlinked.setdefault(node_id, host) != host:
            self._unlinked[node_id] = ""
        accusers = [node for node, named in self._unlinked.items() if named == host]
        if len(accusers) < ACCUSERS:
            return False
        self._unlinked.update(dict.fromkeys(accusers, ""))
        return True

    def idle(self, epoch: Epoch, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        """Newcomers that do not progress as others did, with a line for each, where another node that has not
        failed more often could have the seat. Call it often."""
        entry = self._entry
        if entry is None:
            return {}
        links = max(LATE_SECONDS, LATE_TIMES * median(self._opened)) if self._opened else math.inf
        late = dict.fromkeys(epoch.late_entrants(now, links), "its links open too slowly")
        for node, order in entry.orders.items() if entry.is_stored else ():
            if self._has_caught_up(entry, node, epoch.step):
                entry.since.pop(node, None)
                continue
            size, rate = self._sizes(order.stages)[order.stage], self._roster.members[node].rate
            waited = now - entry.since.setdefault(node, now)
            if waited > LATE_SECONDS + transfer_seconds(size, rate):
                is_here = node in entry.held
                late[node] = "it does not follow" if is_here else "it does not say that its state is here"
        busy = {*epoch.hosts, *epoch.entering, *self._slow, *entry.seats}
        free = [candidate for candidate in candidates if candidate.node_id not in busy]
        return {
            node: f"{why}, and another node could have the seat"
            for node, why in late.items()
            if node in entry.seats
            and any(
                self._failed[rival.node_id] <= self._failed[node]
                and self._assigner.fits(rival, entry.seats[node].stage, epoch.stages)
                for rival in free
            )
        }

    def move(self, epoch: Epoch) -> dict[str, Seat]:
        """The hosts of broken rows that move to complete another row, and their new seats.

        The first row is completed for which rows behind it have the nodes, beginning with the row that lacks
        fewest. A node that follows the run to have one of these seats gets the seat that becomes empty.
        """
        if not self._follows or len(vacant := epoch.vacant) < 2:
            return {}
        taken = {*map(epoch.entering_seat, epoch.entering)}
        lacking = Counter(
            seat.row for seat in vacant if seat not in taken and not epoch.keeps_groups(seat.row)
        )
        rows = sorted(lacking, key=lambda row: (not epoch.takes_groups(row), lacking[row], row))
        for at, row in enumerate(rows):
            empty = [seat for seat in vacant if seat.row == row and seat not in taken]
            moves: dict[str, Seat] = {}
            for seat in empty:
                donors = [epoch.row(other)[seat.stage] for other in reversed(rows[at + 1 :])]
                able = [
                    node
                    for node in donors
                    if node and node not in self._slow and not epoch.loses_groups(node)
                ]
                if able and self._roster.connected(able[:1]):
                    moves[able[0]] = seat
            if len(moves) == len(empty):
                for node, seat in moves.items():
                    self._swap(seat, Seat(epoch.replica_of(node), seat.stage))
                self._moving.update(moves)
                return moves
        return {}

    def returns(self, node_id: str, seat: Seat) -> list[Action]:
        """A node that nobody heard is back, and is to have its seat again: it may hold the state of the step
        that runs. Who follows the run to have that seat goes elsewhere."""
        self._moving[node_id] = seat
        entry = self._entry
        others = [] if entry is None else [node for node, wanted in entry.seats.items() if wanted == seat]
        why = "the node that had the seat is back"
        return [action for node in others if entry is not None for action in self._dropped(entry, node, why)]

    def _swap(self, seat: Seat, other: Seat) -> None:
        """A node that follows the run to have a seat is to have another one of the same stage."""
        known = {} if self._entry is None else self._entry.seats
        for node in [node for node, wanted in known.items() if wanted == seat]:
            known[node] = other

    def extend(self, epoch: Epoch, candidates: Sequence[Candidate]) -> list[Action]:
        """Nodes have come or seats have become empty: more nodes follow at once if others do already."""
        if self._entry is None or not self._entry.may_extend or epoch.lineage is None:
            return []
        return self._fill(self._entry, epoch, self._fillers(epoch, candidates))

    def _fill(self, entry: _Entry, epoch: Epoch, seats: Mapping[str, Seat]) -> list[Action]:
        """These nodes are to follow the run, and then to have these seats."""
        orders = self._orders(epoch, {node: seat.stage for node, seat in seats.items()}, entry.snapshot)
        entry.orders.update(orders)
        entry.seats.update((node, seats[node]) for node in orders)
        sent = [action for node in orders for action in self._told(entry, node)] if entry.is_stored else []
        return [_announced(orders, entry.snapshot), *sent] if orders else []

    def _orders(self, epoch: Epoch, stages: Mapping[str, int], snapshot: int) -> dict[str, Follow]:
        """The order for each node, from the stage that it is to have; none where no host of the stage could
        give it the gradients."""
        assert epoch.lineage is not None, "the epoch has begun"
        return {
            node: Follow(
                step=snapshot,
                stage=stage,
                stages=epoch.stages,
                lineage=epoch.lineage,
                sources=sources,
                storages=epoch.storage_names,
            )
            for node, stage in stages.items()
            if (sources := epoch.sources(stage))
        }

    def to_seat(self, epoch: Epoch) -> dict[str, Seat]:
        """Nodes that have caught up, and do not open the links of their seats yet. None before the hosts have
        opened theirs."""
        entry = self._entry
        if entry is None or epoch.phase in (Phase.PLACING, Phase.RESTORING):
            return {}
        return {
            node: seat
            for node, seat in entry.seats.items()
            if seat.row < epoch.rows
            and node not in epoch.entering
            and self._has_caught_up(entry, node, epoch.step)
        }

    def seated(self, epoch: Epoch, step: int) -> list[str]:
        """Nodes that get their seats with this step: they no longer follow."""
        entry = self._entry
        if entry is None:
            return []
        nodes = [node for node in epoch.linked if self._has_caught_up(entry, node, step)]
        for node in nodes:
            self._forget(entry, node)
            self._failed.pop(node, None)
        return nodes

    def holding(self, epoch: Epoch) -> list[str]:
        """Nodes that get their seats within the running step: their links are open, and they hold its state.

        A node that moved always does. A node that follows the run does if groups wait for its row; otherwise
        it has its seat from the next step on, and nobody waits for it.
        """
        held = {} if self._entry is None else self._entry.held
        nodes = [
            node
            for node in epoch.linked
            if node in self._moving
            or (epoch.takes_groups(epoch.entering_seat(node).row) and held.get(node) == epoch.step)
        ]
        for node in nodes:
            self._moving.pop(node, None)
            self._failed.pop(node, None)
            if self._entry is not None:
                self._forget(self._entry, node)
        return nodes

    def moves(self, node: str) -> bool:
        """Whether it held a seat in the step that runs, and is to have another one in it."""
        return node in self._moving

    def late(self) -> list[str]:
        """Nodes that moved, and did not have their seats before the step was done: they do not hold the state
        any more."""
        moving, self._moving = [*self._moving], {}
        return moving

    def _has_caught_up(self, entry: _Entry, node: str, step: int) -> bool:
        is_near = entry.held.get(node, -1) >= max(0, step - MOST_BEHIND)
        return is_near and self._roster.connected([node])

    def _forget(self, entry: _Entry, node: str) -> None:
        for known in (entry.orders, entry.seats, entry.held, entry.since):
            known.pop(node, None)
        if not entry.orders and not entry.is_open:
            self._entry = None

    def _dropped(self, entry: _Entry, node: str, why: str) -> list[Action]:
        """A node does not fill its seat; others go on."""
        self._forget(entry, node)
        actions: list[Action] = [Announce(text=f"node {node} does not enter: {why}")]
        if node in self._roster.members:
            actions.append(Send(node_id=node, message=Follow(step=entry.snapshot)))
        return actions

    def fails(self, node_id: str, why: str, *, is_fault: bool = True) -> list[Action]:
        """A node that enters cannot; if it `is_fault` of its own, this process does not try again.

        Failures that others may have caused count as its own when there are `MAX_RETRIES` of them.
        """
        self._moving.pop(node_id, None)
        entry = self._entry if self.follows(node_id) else None
        if is_fault or entry is not None:
            self._failed[node_id] += 1
        if is_fault or self._failed[node_id] >= MAX_RETRIES:
            self._slow.add(node_id)
        return [] if entry is None else self._dropped(entry, node_id, why)

    def not_stored(self, step: int) -> list[Action]:
        """There will be no snapshot of this step."""
        return self._given_up("its state is not saved") if self.need(step) else []

    def enter_at_once(self, epoch: Epoch, candidates: Sequence[Candidate], now: float) -> bool:
        """Whether there are newcomers who enter now: before the first step is done its state costs little.

        After `EARLY_SECONDS` they wait for that step. Otherwise a run in which nodes come and go all the time
        would begin it again with each of them, and never be done with it.
        """
        is_early = epoch.step == 0 and epoch.phase is not Phase.APPLYING
        if not is_early or self._assigner.most_rows == 1 or not self._roster.connected(epoch.hosts):
            return False
        if not self._assigner.can_grow(epoch.stages, candidates, len(epoch.whole_rows)):
            return False
        if self._early_since is None:
            self._early_since = now
        return now - self._early_since <= EARLY_SECONDS

    def refused(self, node_id: str) -> bool:
        """The node holds another state than the others. Returns whether that is so for the second time."""
        is_again = node_id in self._refused
        self._refused.add(node_id)
        self._slow.add(node_id)
        return is_again

    # ---- what happens

    def restored(self, epoch: Epoch) -> list[Action]:
        """The hosts of an epoch with more rows hold the state that it begins with."""
        if self._entry is None or all(
            order.lineage == epoch.lineage for order in self._entry.orders.values()
        ):
            return []
        return self._given_up("the run went back to a snapshot")

    def stored(self, step: int) -> list[Action]:
        """The snapshot of `step` is complete. If newcomers wait for an older one, which never will be, they
        follow from this one; so do those that come later, as its files may be on their disks."""
        entry = self._entry
        if entry is None or (entry.is_stored and entry.orders) or step < entry.snapshot:
            return []
        entry.is_stored, entry.snapshot = True, step
        entry.since.clear()
        entry.orders = {node: replace(order, step=step) for node, order in entry.orders.items()}
        entry.steps = [replace(later, snapshot=step) for later in entry.steps if later.step >= step]
        return [action for node in entry.orders for action in self._told(entry, node)]

    def committed(self, epoch: Epoch) -> list[Action]:
        """The newest step of `epoch` is committed."""
        entry, committed = self._entry, epoch.committed
        if entry is None or committed is None:
            return []
        dropped: list[Action] = []
        if len(entry.steps) >= MOST_STEPS:
            slow = {node for node in entry.orders if entry.held.get(node, -1) < committed.step - 1}
            self._slow.update(slow)
            late = slow.union(*self._beyond(entry, epoch, committed.step))
            if late == entry.orders.keys():
                named = _nodes(node for node in entry.orders if node in slow)
                return self._given_up(f"{named} cannot keep up with the run" if slow else "there is no seat")
            for node in [node for node in entry.orders if node in late]:
                dropped += self._dropped(
                    entry, node, "it cannot keep up" if node in slow else "there is no seat"
                )
        votes = [epoch.votes[node] for node in epoch.speakers]
        step = FollowStep(
            snapshot=entry.snapshot,
            step=committed.step,
            clip_coefficient=committed.clip_coefficient,
            lr=committed.lr,
            norms={unit: norm for vote in votes for unit, norm in vote.norms.items()},
            sums={unit: digest for vote in votes for unit, digest in vote.sums.items()},
        )
        entry.steps.append(step)
        if not entry.orders and not entry.is_open:
            self._entry = None
        told = entry.orders if entry.is_stored else {}
        return dropped + [
            Send(node_id=node, message=self._of_stage(order, step)) for node, order in told.items()
        ]

    def message(self, node_id: str, message: NodeMessage) -> list[Action]:
        """A node that hosts no stage says something: of a newcomer, where it is."""
        entry = self._entry
        if not isinstance(message, Following) or entry is None:
            return []
        if node_id not in entry.orders or message.snapshot != entry.snapshot:
            return []
        if message.failed:
            return self.fails(node_id, message.failed)
        was_first = node_id not in entry.held
        if entry.held.get(node_id) != message.step:
            entry.since.pop(node_id, None)
        entry.held[node_id] = message.step
        if not was_first:
            return []
        return [Announce(text=f"node {node_id}: the state is here, and the steps since come next")]

    def arrived(self, node_id: str) -> list[Action]:
        """A member's connection is open again, and it may have missed messages."""
        entry = self._entry
        if entry is None or node_id not in entry.orders or not entry.is_stored:
            return []
        return self._told(entry, node_id)

    def lost(self, node_id: str, epoch: Epoch | None) -> list[Action]:
        """The node is gone, or its state is. A node that failed as it entered, or had not entered yet, is set
        back, because it might do the same again and again."""
        actions = self.fails(node_id, "it is gone") if self.follows(node_id) else []
        self._moving.pop(node_id, None)
        if node_id not in self._slow:
            return actions
        self._slow.discard(node_id)
        if epoch is not None and (steps := self._blame.set_back(node_id, epoch.step, ended=True)):
            line = f"node {node_id} failed as it entered: for {steps} steps others get a seat first"
            actions.append(Announce(text=line, about=node_id))
        return actions

    def epoch_over(self) -> list[Action]:
        """The epoch that they follow is over. So is their attempt, unless the next one has rows for them."""
        self.awaited = False
        self._moving.clear()
        if self._keeps_on:
            self._keeps_on = False
            return []
        return self._given_up("the placement has changed")

    # ---- inside

    def _told(self, entry: _Entry, node_id: str) -> list[Action]:
        order = entry.orders[node_id]
        steps = [Send(node_id=node_id, message=self._of_stage(order, step)) for step in entry.steps]
        return [Send(node_id=node_id, message=order), *steps]

    def _of_stage(self, order: Follow, step: FollowStep) -> FollowStep:
        units = self._units(order.stages)[order.stage]
        norms = {unit: norm for unit, norm in step.norms.items() if unit in units}
        sums = {unit: digest for unit, digest in step.sums.items() if unit in units}
        return replace(step, norms=norms, sums=sums)

    def _given_up(self, why: str) -> list[Action]:
        entry, self._entry = self._entry, None
        if entry is None or not entry.orders:
            return []
        present = [node for node in entry.orders if node in self._roster.members]
        text = f"nobody follows the run from step {entry.snapshot} any more: {why}"
        actions: list[Action] = [Announce(text=text)]
        return actions + [Send(node_id=node, message=Follow(step=entry.snapshot)) for node in present]


def _announced(nodes: Iterable[str], step: int) -> Action:
    text = f"{_nodes(nodes)}: to fetch the state of step {step} and follow the run, until they enter"
    return Announce(text=text)


def _nodes(nodes: Iterable[str]) -> str:
    return ", ".join(f"node {node}" for node in nodes)
