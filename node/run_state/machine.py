"""The run as a pure state machine: its members, its current epoch, and when it is over.

Events are method calls with the time as an argument (seconds on any monotonic clock), and each returns a
list of actions to carry out. There is no I/O, no clock and no randomness: the same events give the same
actions.

Invariants (tested): a stage of a row has at most one node in an epoch; epoch numbers only grow; a step is
committed at most once in an epoch, after every stage voted, and never before the commit is recorded; steps
are committed in order; a node that is gone, leaving or quarantined never gets a stage.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from node.run_state.actions import (
    Aborted,
    AbortKind,
    Action,
    Announce,
    Decide,
    RecordHeldOut,
    RecordPlacement,
    RecordRestored,
    RefuseSnapshot,
    Released,
    Send,
    SnapshotAgreed,
    SnapshotDropped,
    StepDone,
    Stop,
    epoch_over,
    finish_all,
    goodbye,
    let_go,
    run_over,
    sent_away,
)
from node.run_state.audits import Auditor, Contradiction, Difference
from node.run_state.epoch import Assignment, Epoch, EpochSeries, Phase, StepPlan, StepRules
from node.run_state.failures import (
    FASTER,
    Blame,
    Departures,
    Ending,
    Failures,
    GiveUp,
    Late,
    Quarantine,
    RunAgain,
    Slow,
    Stragglers,
    Verdict,
    neighbour_at,
    other_end,
)
from node.run_state.grid import GroupSharing
from node.run_state.held_out import HeldOutSchedule
from node.run_state.membership import Member, Roster, loading_seconds, prefetch, prefetch_first
from node.run_state.newcomers import ACCUSERS, Newcomers
from node.run_state.run_plan import Past, RunPlan
from node.run_state.snapshot_schedule import SnapshotSchedule
from node.run_state.stage_assignment import Candidate, StageAssigner
from node.run_state.state_agreement import (
    MOST_DISPUTES,
    Dispute,
    Finding,
    Settled,
    Standing,
    StateAgreement,
    TooFew,
    WrongState,
)
from node.run_state.votes import (
    Disagreement,
    FiniteUncompressed,
    Implausible,
    NonFinite,
    NotReproduced,
    Outcome,
    Overflow,
    RefusedVote,
    VoteHistory,
)
from node.run_state.wrong_values import Alone, CallThird, Undecided, WrongValues
from node.telemetry.events import QUARANTINED
from wire.messages import (
    Applied,
    AskHeartbeat,
    AwaitedSums,
    FailureKind,
    Following,
    HandedOver,
    NodeMessage,
    PeerSilent,
    Placed,
    Ready,
    Seat,
    StateHashes,
    StepFailed,
    SumsMissing,
    Validated,
    Vote,
)


class RunMachine:
    """One run, from the first hello to `Stop`. `node.coordinator.coordinator` calls it and carries out its
    actions."""

    def __init__(self, plan: RunPlan, step_plan: StepPlan, past: Past) -> None:
        self.plan = plan
        self.stopped = False
        self._roster = Roster(silent_seconds=plan.silent_seconds, reconnect_seconds=plan.reconnect_seconds)
        self._snapshots = SnapshotSchedule(
            every=plan.snapshot_every, newest=past.newest_snapshot, seconds=plan.snapshot_seconds
        )
        self._failures = Failures()
        self._blame = Blame()
        self._departures = Departures()
        auditor = Auditor(
            plan.audit_rate, plan.audit_secret, plan.boundaries, compares=plan.compares_newcomers
        )
        history = VoteHistory(plan.unit_numbers, past.newest, plan.rounds_from)
        for step, past_step in past.later.items():
            history.on_record(step, past_step.norms, past_step.loss)
        self._sharing = GroupSharing(plan.groups)
        rules = StepRules(
            plan=step_plan,
            neighbours=plan.neighbours,
            history=history,
            auditor=auditor,
            scales=past.scales,
            unlabelled=plan.unlabelled,
            group_seconds=self._sharing.estimate,
            handed_over=self._sharing.handed_over,
        )
        self._epochs = EpochSeries(rules, last_number=past.last_epoch, committed=past.committed)
        self._storages = plan.storages(past.storages, plan.stage_bytes)
        self._assigner = StageAssigner(
            stages=plan.stages,
            min_stages=plan.min_stages,
            regroup_seconds=plan.regroup_seconds,
            stage_bytes=self._storages.stage_bytes,
            sharing=plan.sharing,
            remedies=plan.remedies,
            previous=past.hosts,
            most_rows=plan.most_rows,
            previous_rows=past.rows,
            follows=plan.follows,
        )
        self.codecs = plan.codecs(past.codecs, past.committed.step + 1 if past.committed else 0)
        self._quarantine = Quarantine()
        self._stragglers = Stragglers([past_step.seconds for past_step in past.newest])
        self._wrong = WrongValues(self._assigner, self._roster, self._blame, auditor)
        self._newcomers = Newcomers(
            self._assigner,
            self._roster,
            self._blame,
            plan.unit_numbers,
            plan.state_bytes,
            follows=plan.follows,
        )
        self._ending = Ending()
        self._next_split = past.next_split
        """The first step with another split. The run is continued for it (`stop`), which takes a moment."""
        self._states = StateAgreement(plan.unit_numbers, plan.weights_from, plan.moved)
        self._standing = Standing()
        self._undecided = 0
        """Snapshots, one after another, whose state nobody could settle."""
        self._refusing = 0
        """The step of a snapshot that is being set aside; nothing begins before it is."""
        self._measurements = HeldOutSchedule(past.validated, past.best)
        self._relieved: list[str] = []
        """Slow nodes whose stages others take at the next snapshot."""
        self._told_slow: set[str] = set()
        """Slow nodes that the operator knows of."""
        self._told_trends: set[str] = set()
        """Nodes whose norms have left those of earlier steps, as the operator knows."""
        self._unseen = 0.0
        """Seconds of the epoch in which nobody could be received."""
        self.goodbye = goodbye("the run is over", failed=False, done=True)
        """What nodes receive when the run is over."""

    @property
    def epoch(self) -> Epoch | None:
        """The placement that is on, if one is."""
        return self._epochs.current

    @property
    def members(self) -> Mapping[str, Member]:
        """The members of the run, in the order in which they joined."""
        return self._roster.members

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Nodes that are shut out for what their neighbours reported, and the reports."""
        return self._quarantine.why

    @property
    def newest_snapshot(self) -> int:
        """The newest one that is complete and on disk; 0 before there is one."""
        return self._snapshots.newest

    # ---- who is here

    def hello(
        self, offer: Candidate, *, address: str, process_nonce: int, epoch: int, now: float, rate: float = 0.0
    ) -> list[Action]:
        """A node opened its control connection: for the first time, again, or as a new process.

        `epoch` is the one it believes to be in, 0 for none. `rate` is bytes a second from the coordinator (0:
        unknown). A node that cannot host any stage is sent away.
        """
        node_id = offer.node_id
        if self.stopped:
            return finish_all([node_id], self.goodbye)
        if node_id in self.quarantined:
            return sent_away(node_id, f"{QUARANTINED}{self.quarantined[node_id]}")
        actions: list[Action] = []
        member = self.members.get(node_id)
        if member is not None and member.process_nonce != process_nonce:
            # Not `lost`: its session is the new process's already, and must stay open.
            del self._roster.members[node_id]
            again = f"node {node_id} was started again"
            actions += [Announce(text=again), *self._unassign(node_id, again, now)]
            member = None
        if member is None and (line := self._assigner.useless(offer)) is not None:
            return [*actions, *sent_away(node_id, line), *self._try_place(now)]
        if member is None and (before := self._departures.arrives(offer, self.members)) is not None:
            self._blame.inherit(node_id, before)
        self._roster.arrived(offer, address=address, process_nonce=process_nonce, rate=rate, now=now)
        current = self.epoch if self.epoch is not None and self.epoch.has(node_id) else None
        if epoch and (current is None or current.number != epoch):
            actions += epoch_over([node_id], epoch, "that epoch is over")
            if returns := self._returns(node_id, epoch, now):
                return actions + returns
        if current is not None:
            return actions + current.ask_again(node_id)
        if node_id in (self.epoch.entering if self.epoch is not None else ()):
            actions += self._no_entrant(node_id, "its connection broke", is_fault=False)
        actions += self._try_place(now) + self._join_early(now)
        present = self.epoch
        extended = [] if present is None else self._newcomers.extend(present, self._candidates())
        repeated = [] if extended else self._newcomers.arrived(node_id)
        return [*actions, *extended, *self._prefetch([node_id]), *repeated]

    def heard(
        self,
        node_id: str,
        now: float,
        kind: str | None = None,
        *,
        preparing: bool = False,
        awaited: AwaitedSums | None = None,
    ) -> None:
        """A node lives. `kind`: what it spends most time on, a `TimeKind` or "" for nothing, if it says.
        `preparing`: it cannot take a place yet, as it tests its device, measures or compiles. `awaited`: sums
        that it waits for."""
        self._roster.heard(node_id, now)
        if preparing and node_id in self.members and not self.members[node_id].has_placed:
            self.members[node_id].prepared_at = now - self._unseen
        if kind is not None:
            self._stragglers.says(node_id, kind, now - self._unseen, awaited)

    def disconnected(self, node_id: str, now: float) -> list[Action]:
        """The control connection broke. Death is declared by `tick` if the node does not come back, and at
        once if neighbours do not hear it either."""
        self._roster.disconnected(node_id, now)
        return self._if_silenced([node_id], now)

    def tick(self, now: float, *, unseen: float = 0.0) -> list[Action]:
        """Call about twice a second: declares silent and vanished nodes dead, regroups when it is time.

        `unseen`: seconds, until now, in which the coordinator read no messages: it was suspended, or its disk
        was full.
        """
        if unseen:
            self._roster.excuse(unseen, now)
            self._assigner.excuse(unseen)
            self._unseen += unseen
        overdue = self._roster.overdue(now)
        actions = [action for node, reason in overdue.items() for action in self._unheard(node, reason, now)]
        actions += self._if_silenced([*self.members], now)
        seen = now - self._unseen
        actions += self._late_newcomers(seen)
        loading = loading_seconds(self.epoch, self._roster, self.plan.state_bytes)
        late = self._disputed(self._stragglers.look(self.epoch, seen, loading))
        unsaved, slow = self._snapshots.overdue(seen)
        actions += [Announce(text=text) for text in (late.note, slow) if text is not None]
        prepared = {node: member.prepared_at for node, member in self.members.items()}
        unplaced = self._epochs.unplaced(seen, prepared)
        out = unplaced | self._replaceable(late.nodes) | unsaved
        for node_id, line in out.items():
            if node_id in unsaved and self._snapshots.awaited:
                self._ending.missing(f"node {node_id} did not hand in its layers")
            actions += self._replace_straggler(node_id, line, now)
        if late.deadlock is not None and self.epoch is not None and not out:  # else that may be over
            actions += self._failed(self.epoch, *late.deadlock, now)
        if self.epoch is not None:
            actions += self.epoch.give(seen)
        return actions + self._try_place(now)

    def lost(self, node_id: str, reason: str, now: float) -> list[Action]:
        """The node is dead, was evicted, or says itself that it ends."""
        return self._gone(node_id, reason, now) + self._try_place(now)

    def refused(self, node_id: str, why: str, now: float) -> list[Action]:
        """A message of this node was refused: no correct node sends it."""
        if self.stopped or node_id in self.quarantined:
            return []
        return self._strike(node_id, why, now) or [
            Announce(text=f"a message of node {node_id} was refused: {why}")
        ]

    def leave(self, node_id: str, now: float) -> list[Action]:
        """The node asks to go. It is released once the state it holds is on disk, or the epoch has failed."""
        member = self.members.get(node_id)
        if member is None or self.stopped:
            return []
        member.leaving = True
        epoch = self.epoch
        hosts = epoch is not None and epoch.has(node_id)
        actions = self._stands_out(epoch, node_id, now) if epoch is not None and hosts else []
        if epoch is not None and hosts and self._holds_progress(epoch):
            return actions  # `_placed` or, after the step, `_between_steps` sees the flag
        return actions + self._release(node_id, now) + self._try_place(now)

    def stop(self, reason: str, *, at_once: bool, soon: bool = False) -> list[Action]:
        """The operator ends the run: after this step and a snapshot, however often asked, or at once.

        `soon`: it goes on in a moment, with other settings.
        """
        self._ending.ask(reason, soon=soon)
        if not at_once and self.epoch is not None and self._holds_progress(self.epoch):
            return []
        return self._end()

    # ---- what nodes say

    def message(self, node_id: str, message: NodeMessage, now: float) -> list[Action]:
        """Handle one control message. Messages of another epoch, or from a node without a stage, are dropped,
        except for complaints: the node at fault may have reported its broken link first."""
        self.heard(node_id, now)
        self._stragglers.answered(node_id, message, now - self._unseen)
        try:
            if isinstance(message, StateHashes):
                return self._state_reported(node_id, message, now)
            epoch, ended = self.epoch, self._epochs.ended
            if isinstance(message, StepFailed) and ended is not None and message.epoch == ended.number:
                return self._complaint(ended, node_id, message, now)
            if epoch is not None and node_id in epoch.entering:
                return [*self._entering(epoch, node_id, message, now), *self._take_seats(epoch, now)]
            if self.stopped or epoch is None or not epoch.has(node_id):
                actions = self._newcomers.message(node_id, message)
                return actions if self.stopped or epoch is None else actions + self._enter(epoch, now)
            match message:
                case Placed() if message.epoch == epoch.number:
                    return self._placed(epoch, node_id, message, now)
                case Ready() if message.epoch == epoch.number:
                    return self._progress(epoch, epoch.ready(node_id), now)
                case Vote() if message.epoch == epoch.number:
                    return self._voted(epoch, epoch.vote(node_id, message), now)
                case HandedOver() if message.epoch == epoch.number:
                    outcome = epoch.handed_over(node_id, message, now - self._unseen)
                    return self._voted(epoch, outcome, now)
                case Applied() if message.epoch == epoch.number:
                    return self._progress(epoch, epoch.applied(node_id, message.step), now)
                case Validated() if message.epoch == epoch.number:
                    return self._held_out(epoch, epoch.validated(node_id, message), now)
                case StepFailed() if message.epoch == epoch.number:
                    return self._failed(epoch, node_id, message, now)
                case PeerSilent() if message.epoch == epoch.number:
                    return self._suspected(epoch, node_id, message, now)
                case SumsMissing() if message.epoch == epoch.number:
                    return self._sums_missing(epoch, node_id, message, now)
                case _:
                    return []
        finally:
            # A phase may have begun or ended.
            self._stragglers.watch(self.epoch, now - self._unseen)

    def layer_received(self, step: int, unit: str, now: float) -> list[Action]:
        """A node has handed in a layer of a snapshot; `snapshot_stored` follows when all are on disk."""
        self._snapshots.layer_received(step, unit, now - self._unseen)
        return []

    def layer_refused(self, node_id: str, step: int, why: str, now: float) -> list[Action]:
        """No correct node sends what this one handed in as a layer of the snapshot of `step`.

        Its stage goes to another node, which has the state or goes on from the snapshot before: nobody else
        could hand in the layers of that stage.
        """
        actions = self.refused(node_id, why, now)
        under_way, epoch = self._snapshots.refused(step), self.epoch
        if self.stopped or epoch is None or node_id not in epoch.hosts or not under_way:
            return actions
        if self._ending.due:
            self._ending.missing(f"what node {node_id} handed in of its layers was refused")
            return [*actions, *self._replace_straggler(node_id, why, now), *self._try_place(now)]
        verdict = self._failures.failed(epoch, node_id, why)
        culprit = self._wrong.leave_out_one([node_id], epoch.step, now, by=node_id)
        if culprit is not None:
            verdict = self._failures.stage_given_up(epoch, culprit, verdict)
        return [*actions, *self._after_failure(epoch, verdict, now)]

    def snapshot_stored(self, step: int, now: float) -> list[Action]:
        """The snapshot of `step` is complete and on disk."""
        self._snapshots.stored(step)
        self._states.stored(step)
        if self.stopped or (epoch := self.epoch) is None:
            return []
        actions = self._prefetch(self.members) + self._newcomers.stored(step)
        if self._snapshots.awaited and epoch.step == step:
            self._snapshots.go_on()
            actions += self._between_steps(epoch, now)
            self._stragglers.watch(self.epoch, now - self._unseen)
        return actions

    def snapshot_gone(self, step: int, why: str, now: float) -> list[Action]:
        """The nodes that saved a layer of the snapshot of `step` are gone, and no other has a copy."""
        return [] if self.stopped or step <= self._snapshots.newest else self._drop_snapshot(step, why, now)

    def snapshot_damaged(self, step: int, whole: int) -> list[Action]:
        """The snapshot of `step` is damaged; `whole` is the newest that is not, 0 if none is."""
        self._snapshots.damaged(step, whole)
        refused, self._refusing = self._refusing == step, 0
        if not refused or whole or self.stopped:
            return []
        why = f"the snapshot of step {step} is not the run's state, and there is no older one"
        self._ending.give_up(
            GiveUp(kind=AbortKind.DIFFERS, reason=why, why=why, remedy="go on from a copy of an older one")
        )
        return self._end()

    def wrong_layer(self, node_id: str, step: int, unit: str, now: float) -> list[Action]:
        """A node handed in another layer than the one that was agreed on; it was not stored."""
        if self.stopped:
            return []
        why = f"the layer {unit} that it handed in is not the one of step {step} that was agreed on"
        return self._convict({node_id: why}, now)

    def plan_windows(self, epoch: int, windows: tuple[int, ...]) -> list[Action]:
        """From this epoch's next step on, and in later epochs with the same number of stages, links use these
        windows."""
        self._epochs.plan_windows(epoch, windows)
        return []

    def row_speeds(self, seconds: Mapping[str, float], step_seconds: float, now: float) -> list[Action]:
        """Record the measured seconds of nodes per gradient group, in a step that took `step_seconds`."""
        self._sharing.measured(seconds, step_seconds, now)
        return []

    def uneven_speeds(self, seconds: Mapping[str, float]) -> list[Action]:
        """Record the measured seconds per gradient group of nodes whose rows computed other groups than they
        were placed with."""
        self._sharing.measured_unevenly(seconds)
        return []

    def save(self) -> list[Action]:
        """The operator asks for a snapshot: the next step that ends has one, due or not."""
        self._snapshots.request()
        return []

    def fail(self, reason: str) -> list[Action]:
        """Something that the run cannot do without has failed; snapshots on disk are intact."""
        return self._stop(reason, failed=True)

    # ---- inside: who is silent

    def _suspected(self, epoch: Epoch, node_id: str, message: PeerSilent, now: float) -> list[Action]:
        """A node does not hear its neighbour. What it says is no proof: the neighbour is asked."""
        other = neighbour_at(epoch, node_id, message.stage, message.replica)
        if self.stopped or other is None:
            return []
        asked = self._roster.suspect(other, now, by=node_id)
        asks: list[Action] = [Send(node_id=other, message=AskHeartbeat())] if asked else []
        return [*asks, *self._if_silenced([other], now)]

    def _sums_missing(self, epoch: Epoch, node_id: str, message: SumsMissing, now: float) -> list[Action]:
        """A row that has lost a node is to compute its groups again, or the step ends."""
        if self.stopped:
            return []
        missed = epoch.missed(node_id, message, now - self._unseen)
        if missed is not None:
            return missed
        why = f"node {node_id} lacks what row {message.replica} is to have handed over"
        return self._end_epoch(AbortKind.LOST, why) + self._try_place(now)

    def _if_silenced(self, nodes: Sequence[str], now: float) -> list[Action]:
        """Members that neither the coordinator nor a neighbour hears are gone, if others can do their work.
        If nobody can, there is time to wait for them."""
        actions: list[Action] = []
        for node_id in nodes:
            why = self._roster.silenced(node_id, now) if node_id in self.members else None
            if why is not None and self._can_do_without(node_id):
                actions += [*self._unheard(node_id, why, now), *self._try_place(now)]
        return actions

    def _unheard(self, node_id: str, why: str, now: float) -> list[Action]:
        """A node counts as dead, and may come back."""
        if self.epoch is not None and self.epoch.has(node_id):
            self.epoch.unheard(node_id)
        return self._gone(node_id, why, now)

    def _can_do_without(self, node_id: str) -> bool:
        epoch = self.epoch
        if epoch is None or not epoch.has(node_id):
            return False
        if self.plan.follows and epoch.can_lose(node_id):
            return True
        has_begun = epoch.phase not in (Phase.PLACING, Phase.RESTORING)
        return has_begun and self._assigner.can_hand_over(node_id, self._candidates())

    def _returns(self, node_id: str, number: int, now: float) -> list[Action]:
        """A node that was silent is back within the step: it has its seat again if it holds the state."""
        epoch = self.epoch
        if epoch is None or (epoch.number, epoch.phase) != (number, Phase.STEPPING) or not self.plan.follows:
            return []
        if (seat := epoch.seat_left(node_id)) is None:
            return []
        if self._blame.is_set_back(node_id, epoch.step):
            return []
        return [*self._newcomers.returns(node_id, seat), *self._offer_seat(epoch, node_id, seat, now)]

    # ---- inside: which state is the run's

    def _state_reported(self, node_id: str, message: StateHashes, now: float) -> list[Action]:
        if self.stopped:
            return []
        if (why := self._states.refusal(node_id, message)) is not None:
            return self.refused(node_id, why, now)
        self._snapshots.hashes_reported(message.step, node_id, now - self._unseen)
        return self._agreed(self._states.take(node_id, message), now)

    def _agreed(self, findings: Sequence[Finding], now: float) -> list[Action]:
        actions: list[Action] = []
        out: dict[str, str] = {}
        left = ""
        for finding in findings:
            if self.stopped:
                break
            match finding:
                case Settled():
                    self._undecided = 0
                    self._wrong.cleared(finding.cleared)
                    if self.epoch is not None:
                        self._standing.prove(self.epoch, finding.proven)
                    actions.append(
                        SnapshotAgreed(step=finding.step, units=finding.units, alone=[*finding.alone])
                    )
                case WrongState(node_id=node, why=why) if self._leaves_newcomer(node, now):
                    left = why
                    actions.append(Announce(text=f"node {node} has no stage any more: {why}", about=node))
                case WrongState(node_id=node, why=why):
                    out[node] = why
                case TooFew(step=step):
                    why = "nodes that held the state are gone, so it cannot be checked"
                    actions += self._drop_snapshot(step, why, now)
                case Dispute():
                    actions += self._dispute(finding, now)
        # All of them first: none is placed again.
        over = self._end_epoch(AbortKind.DIFFERS, left) if left else []
        return [*actions, *over, *self._convict(out, now), *(self._try_place(now) if left else ())]

    def _leaves_newcomer(self, node_id: str, now: float) -> bool:
        """A newcomer fetched what it holds: it gives up its stage, and nothing is held against it the first
        time. False if it is to be shut out."""
        epoch = self.epoch
        if epoch is None or node_id not in epoch.newcomers or self._newcomers.refused(node_id):
            return False
        if self._wrong.leave_out_one([node_id], epoch.step, now, by=node_id) is None:
            return False
        self._wrong.cleared([node_id])
        return True

    def _convict(self, why: Mapping[str, str], now: float) -> list[Action]:
        """Shut nodes out for states that are not the run's; another snapshot is taken at once."""
        news = [node for node, line in why.items() if self._quarantine.convict(node, line)]
        if not news:
            return []
        self._snapshots.request()
        return [action for node in news for action in self._out(node, now)] + self._try_place(now)

    def _drop_snapshot(self, step: int, why: str, now: float) -> list[Action]:
        """A snapshot is not taken; if the run waits for it, it goes on."""
        waits, epoch = self._snapshots.awaited, self.epoch
        dropped: list[Action] = [SnapshotDropped(step=step), *self._newcomers.not_stored(step)]
        if self._snapshots.drop(step):
            dropped.append(Announce(text=f"the snapshot of step {step} is not taken: {why}"))
        self._snapshots.request()
        if waits and not self._snapshots.awaited and epoch is not None and epoch.phase is Phase.IDLE:
            return [*dropped, *self._between_steps(epoch, now)]
        return [*dropped]

    def _dispute(self, dispute: Dispute, now: float) -> list[Action]:
        """Another node computes the state again, from the newest snapshot; without one it is not saved, and
        after a few times the run ends."""
        epoch, waits = self.epoch, self._snapshots.awaited
        self._snapshots.drop(dispute.step)
        dropped: list[Action] = [SnapshotDropped(step=dispute.step)]
        named = " and ".join(f"node {node}" for node in dispute.nodes)
        who = f"which of {named}" if len(dispute.nodes) > 1 else f"whether {named}"
        again = self._states.may_try_again(dispute.step) and not self._ending.due
        if epoch is not None and again:
            line = self._wrong.third_for_state(epoch, dispute.nodes, now)
            if line:
                note = f"the snapshot of step {dispute.step} is not taken: {dispute.what} ({named}); {line}"
                self._epochs.leave()
                self._snapshots.again(dispute.step)
                over = self._end_epoch(AbortKind.DIFFERS, dispute.what)
                return [*dropped, Announce(text=note), *over, *self._try_place(now)]
        self._undecided += 1
        note = (
            f"the snapshot of step {dispute.step} is not taken: {dispute.what}, and no other node can say "
            f"{who} is right: let another node of their kind join"
        )
        if not waits and not self._ending.due and self._undecided <= MOST_DISPUTES:
            return [*dropped, Announce(text=note)]
        self._ending.give_up(
            GiveUp(
                kind=AbortKind.DIFFERS,
                reason=dispute.what,
                why=f"{dispute.what}, and no other node can say {who} is right",
                remedy="resume with more nodes",
            )
        )
        return [*dropped, *self._end_epoch(AbortKind.DIFFERS, dispute.what), *self._end()]

    def _not_reproduced(self, epoch: Epoch, odd: NotReproduced, now: float) -> list[Action]:
        """Others compute again what one node alone reports. If they find the same, the loaded snapshot is not
        what the run computed: go back to an older one."""
        if odd.node_id is not None:
            again = self._checked(epoch, odd.node_id, odd.what, now)
            if again is not None:
                return again
        sources = self._states.held_alone(odd.snapshot)
        came = f"; node {', node '.join(sources)} alone held what was saved" if sources else ""
        note = (
            f"step {epoch.step + 1} is not committed: {odd.what}; the snapshot of step {odd.snapshot} is "
            f"set aside{came}"
        )
        self._refusing = odd.snapshot
        self._epochs.leave()
        over = self._end_epoch(AbortKind.DIFFERS, odd.what)
        return [Announce(text=note), *over, RefuseSnapshot(step=odd.snapshot, reason=odd.what)]

    # ---- inside: steps

    def _placed(self, epoch: Epoch, node_id: str, message: Placed, now: float) -> list[Action]:
        self.members[node_id].has_placed = True
        if epoch.phase is not Phase.PLACING:
            return []  # said again
        return self._state_chosen(epoch, now) if epoch.placed(node_id, message) else []

    def _state_chosen(self, epoch: Epoch, now: float) -> list[Action]:
        """Restore the state that the epoch has chosen. An epoch that only has to hand in its state does that
        at once instead: a restore needs links, and these may be what failed."""
        if epoch.behind and self.plan.follows:
            # As after a death of the coordinator while a node entered.
            named = ", ".join(f"node {node}" for node in epoch.behind)
            why = f"{named}: behind the state that every stage has a node of; the others go on without it"
            for node in epoch.behind:
                self._assigner.vacate(node, now)
            return [Announce(text=why), *self._end_epoch(AbortKind.PLACEMENT, why), *self._try_place(now)]
        # A commit that somebody missed comes with the restore.
        misses = self._snapshots.newest < epoch.step and not epoch.all_hold_it
        if misses or not self._is_to_end(epoch):
            return [*self.codecs.begin(epoch), *self._storages.begin(epoch), *epoch.restore()]
        epoch.pause()
        return self._between_steps(epoch, now)

    def _voted(self, epoch: Epoch, outcome: Outcome, now: float) -> list[Action]:
        match outcome:
            case []:
                return outcome  # others have not voted yet
            case NonFinite():
                return self._not_finite(epoch, outcome.node_id, outcome.what, now)
            case Overflow():
                if not self._ending.due and (again := self._wrong.overflow(epoch, outcome.nodes, now)):
                    return self._after_failure(epoch, again, now)
                return self._voted(epoch, epoch.skip_step(), now)
            case FiniteUncompressed():
                return self._after_failure(epoch, self._finite_uncompressed(epoch, now), now)
            case RefusedVote():
                actions = self.refused(outcome.node_id, outcome.why, now)
                stays = self.epoch is epoch and epoch.has(outcome.node_id)
                return actions + (epoch.ask_again(outcome.node_id) if stays else [])
            case Disagreement() | Difference():
                return self._rows_differ(epoch, outcome, now)
            case Contradiction():
                return self._failed(epoch, outcome.receiver, outcome.complaint(epoch.number), now)
            case NotReproduced():
                return self._not_reproduced(epoch, outcome, now)
            case Implausible():
                return self._implausible(epoch, outcome, now)
            case _:
                if outcome and epoch.committed is not None:
                    self._epochs.committed(epoch.committed)
                    self._failures.committed(epoch.committed.step)
                    self._standing.stepped(epoch)
                    # Before the step that it is seated with, a newcomer hears of the one before.
                    follows = self._newcomers.committed(epoch)
                    notes = [*self._settle_doubt(epoch, now), *self._relieve_slow(epoch, now)]
                    late = self._late_movers()
                    return [*outcome, *follows, *late, *self._apply(epoch, now), *notes]
                return outcome

    def _apply(self, epoch: Epoch, now: float) -> list[Action]:
        """A step is committed: it is applied, with the begin of the next one if nothing is to be done before.

        Most steps follow the one before at once: then a vote for the next says that this one was applied.
        """
        if self.epoch is not epoch or self.stopped or not self._goes_on_at_once(epoch, now - self._unseen):
            return epoch.apply()
        if epoch.steps_done:
            self._step_applied(epoch, epoch.step - 1)  # said by the votes for this one
        return self._open_step(epoch, epoch.step + 1, now)

    def _open_step(self, epoch: Epoch, step: int, now: float) -> list[Action]:
        """Open a step between two steps, or the next one together with the commit of the epoch's own step."""
        epoch.opened_at = now - self._unseen
        seated = self._newcomers.seated(epoch, step)
        self._note_seated(epoch, seated, now)
        open_step = epoch.begin if step == epoch.step else epoch.go_on
        # The nodes that take their seats need the sums of the step before, too.
        actions = open_step(keep_sums=self._newcomers.follow or bool(seated), seated=seated)
        self._standing.noted(epoch, seated)
        return actions + self._complete_rows(epoch, now)

    def _step_applied(self, epoch: Epoch, step: int) -> None:
        """All stages of the epoch have applied this step of it."""
        self._failures.forgive()
        self._blame.done(epoch.hosts, step + 1)
        self.codecs.step_done(step)

    def _progress(self, epoch: Epoch, actions: list[Action], now: float) -> list[Action]:
        """Decide what comes next after a restore or a step is complete."""
        if not actions:
            return []
        if isinstance(actions[-1], RecordRestored):
            self._standing.began(epoch)
            actions = [*actions, *self._newcomers.restored(epoch), *self._enter(epoch, now)]
        elif isinstance(actions[-1], StepDone):
            self._step_applied(epoch, epoch.step - 1)
        if epoch.step < self.plan.total_steps and self._other_rows(epoch, epoch.step) is None:
            actions = [*actions, *self._snapshot_if_wanted(epoch, now)]
        return actions + self._between_steps(epoch, now)

    def _snapshot_if_wanted(self, epoch: Epoch, now: float, *, within: bool = False) -> list[Action]:
        """Take a snapshot beside the next steps, if one is due or if nodes are here that could form a row.
        `within`: in a step that has lost a node, only for nodes that follow to have its seat."""
        # Also after a restore: the epoch that should have taken this snapshot may have ended badly.
        step, seen = epoch.step, now - self._unseen
        due = not within and self._snapshots.due(step, seen)
        able = self._may_go_on(epoch) and self._snapshots.reachable(step)
        began = self._newcomers.begin(epoch, self._candidates(), able=able, due=due)
        if self._snapshots.newest == step:
            return began + self._newcomers.stored(step)
        wanted = self._newcomers.need(step) and self._snapshots.room(step)
        if not within:
            wanted = wanted or self._snapshots.wanted(step, seen)
        if wanted and self._may_go_on(epoch):
            return began + self._take_snapshot(epoch, now, await_it=False, within=within)
        return began

    def _take_snapshot(
        self, epoch: Epoch, now: float, *, await_it: bool, within: bool = False
    ) -> list[Action]:
        seen = now - self._unseen
        actions = self._snapshots.take(epoch, self.plan, seen, await_it=await_it, within=within)
        self._states.expect(epoch)
        return actions

    def _held_out(self, epoch: Epoch, actions: list[Action] | RefusedVote, now: float) -> list[Action]:
        """After a pass over held-out samples, and once all are done, record the loss and continue."""
        if isinstance(actions, RefusedVote):
            return self._voted(epoch, actions, now)
        if not actions or not isinstance(record := actions[-1], RecordHeldOut):
            return actions
        best = self._measurements.record(epoch.step, record.uncompressed)
        actions = [*actions[:-1], replace(record, best=best)]
        kept = best and self.plan.keep_best and self._may_go_on(epoch)
        if kept and self._snapshots.saves_best(epoch.step, now - self._unseen):
            actions += self._take_snapshot(epoch, now, await_it=False)
        return actions + self._between_steps(epoch, now)

    def _between_steps(self, epoch: Epoch, now: float) -> list[Action]:
        if self._validation_due(epoch, epoch.step):
            return epoch.validate(self.plan.held_out, self.plan.microbatch, self.plan.label_weight)
        if self._may_go_on(epoch):
            if (grid := self._other_rows(epoch, epoch.step)) is not None:
                return self._change_rows(epoch, grid, now)
            if self._moves_groups(epoch, epoch.step, epoch.steps_done):
                return self._new_placement(now)
            return self._open_step(epoch, epoch.step, now)
        if self._snapshots.newest < epoch.step and not self._leaves_to_others(epoch):
            return self._take_snapshot(epoch, now, await_it=True)
        if epoch.step >= self.plan.total_steps:
            return self._stop("all steps are done", failed=False)
        if self._ending.due:
            return self._end()
        if epoch.step >= self._next_split:
            return []
        if self._newcomers.awaited:
            self._wrong.make_room(epoch, now)
            self._take_from_slow(epoch, now)
            self._assigner.regroup(now)
        return self._new_placement(now)

    # ---- inside: what is to be done between two steps (`step`: the one that runs next if nothing else is)

    def _is_to_end(self, epoch: Epoch) -> bool:
        """Whether the epoch ends once its state is on disk, because the run does or a stage leaves."""
        return self._ending.due or bool(self._roster.leaving(epoch.hosts))

    def _may_go_on(self, epoch: Epoch, ahead: int = 0) -> bool:
        """Whether the epoch goes on to the step that is so many after its own."""
        stays = self._newcomers.awaited or self._is_to_end(epoch)
        return not stays and epoch.step + ahead < min(self.plan.total_steps, self._next_split)

    def _leaves_to_others(self, epoch: Epoch) -> bool:
        """Whether the epoch ends only for nodes that leave, and other rows hold the state of their stages."""
        stays = self._ending.due or self._newcomers.awaited or epoch.step >= self.plan.total_steps
        return not stays and self._roster.dispensable(epoch)

    def _validation_due(self, epoch: Epoch, step: int) -> bool:
        """Whether the held-out loss of this step's state is to be measured."""
        plan = self.plan
        if not plan.held_out or epoch.uncompressed or self._is_to_end(epoch) or self._snapshots.awaited:
            return False
        also = self._snapshots.is_measured(step)
        return self._measurements.due(step, plan.valid_every, plan.total_steps, also=also)

    def _other_rows(self, epoch: Epoch, step: int) -> tuple[str, ...] | None:
        """The grid of the next epoch, if that is to have another number of rows."""
        return self._newcomers.rows_change(epoch, self._candidates(), step) if self._snapshots.idle else None

    def _moves_groups(self, epoch: Epoch, step: int, steps_done: int) -> bool:
        """Whether it pays to give rows other groups or links other codecs; or a replay has other codecs."""
        left = self.plan.total_steps - step
        # What an empty seat changes is over sooner.
        free = not epoch.vacant and self._snapshots.idle and self._roster.connected(epoch.hosts)
        gains = free and self._sharing.may_gain(epoch.hosts, epoch.groups, steps=steps_done, left=left)
        return self.codecs.recorded_change(epoch, step) or (
            free and (gains or self.codecs.may_gain(epoch, step))
        )

    def _holds_progress(self, epoch: Epoch) -> bool:
        """Whether the epoch may be past the newest snapshot, so that ending it now would lose work."""
        return epoch.phase in (Phase.STEPPING, Phase.APPLYING) or self._snapshots.newest < epoch.step

    def _goes_on_at_once(self, epoch: Epoch, now: float) -> bool:
        """Whether nothing is to be done between the step that was just committed and the next: no snapshot,
        no measurement, no end of the epoch, and no nodes enter."""
        step = epoch.step + 1
        return (
            self._may_go_on(epoch, ahead=1)
            and not self._snapshots.awaited
            and not self._snapshots.wanted_or_due(step, now)
            and not self._validation_due(epoch, step)
            and self._other_rows(epoch, step) is None
            and not self._newcomers.may_begin(epoch, self._candidates())
            and not self._moves_groups(epoch, step, epoch.steps_done + 1)
        )

    def _change_rows(self, epoch: Epoch, grid: tuple[str, ...], now: float) -> list[Action]:
        """Begin an epoch with a row more, whose newcomers take their seats in it, or without an empty row."""
        self._assigner.take(grid, epoch.stages)
        self._newcomers.rows_changed(epoch, grid, epoch.step)
        why = "nodes that followed the run enter" if len(grid) > len(epoch.grid) else "a row is empty"
        return self._end_epoch(AbortKind.PLACEMENT, why) + self._begin_epoch(grid, now)

    def _new_placement(self, now: float) -> list[Action]:
        return self._end_epoch(AbortKind.PLACEMENT, "the placement changes") + self._try_place(now)

    def _join_early(self, now: float) -> list[Action]:
        """Let newcomers enter at once before the first step is done, when the state costs little."""
        epoch, over = self.epoch, self.stopped or self._ending.due
        if epoch is None or over or not self._newcomers.enter_at_once(epoch, self._candidates(), now):
            return []
        self._assigner.regroup(now)
        return self._new_placement(now)

    # ---- inside: empty seats

    def _enter(self, epoch: Epoch, now: float) -> list[Action]:
        """Let nodes that have caught up open the links of their seats."""
        actions: list[Action] = []
        for node, seat in self._newcomers.to_seat(epoch).items():
            actions += self._offer_seat(epoch, node, seat, now)
        return actions

    def _offer_seat(self, epoch: Epoch, node_id: str, seat: Seat, now: float) -> list[Action]:
        address, kind = self.members[node_id].address, self._roster.kinds([node_id])[0]
        return epoch.enter(node_id, seat, address, kind, now - self._unseen)

    def _entering(self, epoch: Epoch, node_id: str, message: NodeMessage, now: float) -> list[Action]:
        """Handle a message of a node that opens the links of its seat."""
        match message:
            case Placed() if message.epoch == epoch.number:
                if self._newcomers.moves(node_id) and message.held_step != epoch.step:
                    # It left its seat before it had applied the step before.
                    why = f"it holds the state of step {message.held_step}"
                    return self._no_entrant(node_id, why, is_fault=False)
                return epoch.entrant_placed(node_id)
            case Ready() if message.epoch == epoch.number:
                if epoch.entrant_linked(node_id):
                    seconds = now - self._unseen - epoch.entering_since[node_id]
                    self._newcomers.opened(seconds, epoch.beside(node_id).values())
                return []
            case PeerSilent() if message.epoch == epoch.number:
                return self._no_link(epoch, node_id, Seat(message.replica, message.stage), now)
            case StepFailed() if message.epoch == epoch.number:
                seat, is_fault = Seat(message.peer_replica, message.peer_stage), True
                actions = []
                if message.kind is FailureKind.LINK:
                    is_fault = False
                    actions = self._no_link(epoch, node_id, seat, now)
                return [*actions, *self._no_entrant(node_id, message.message, is_fault=is_fault)]
            case Following():
                actions = self._newcomers.message(node_id, message)
                if self._newcomers.follows(node_id) or self._newcomers.moves(node_id):
                    return actions
                return actions + self._no_entrant(node_id, "it follows no longer")
            case _:
                return []  # of the seat that it had before

    def _no_link(self, epoch: Epoch, node_id: str, seat: Seat, now: float) -> list[Action]:
        """A newcomer says that its link to the host of this seat does not open. If several newcomers say so,
        the host gives up its seat, because the seats beside it would stay empty."""
        host = epoch.beside(node_id).get(seat)
        if host is None or not epoch.can_lose(host) or not self._newcomers.unlinked(node_id, host):
            return []
        self._blame.set_back(host, epoch.step)
        why = f"{ACCUSERS} newcomers could not open links to it"
        note = f"node {host} gives up its seat, and gets one only if no other node is left: {why}"
        over = epoch_over([host], epoch.number, why)
        return [
            Announce(text=note, about=host),
            *over,
            *self._unassign(host, why, now),
            *self._try_place(now),
        ]

    def _no_entrant(self, node_id: str, why: str, *, is_fault: bool = True) -> list[Action]:
        """A node that enters does not get its seat."""
        if (epoch := self.epoch) is None or node_id not in epoch.entering:
            return []
        emptied = epoch.drop_entrant(node_id)
        over = epoch_over([node_id], epoch.number, f"it does not enter: {why}")
        return [*over, *emptied, *self._newcomers.fails(node_id, why, is_fault=is_fault)]

    def _late_newcomers(self, now: float) -> list[Action]:
        """Newcomers that do not progress do not get their seats. Others that could have them begin now."""
        epoch, actions = self.epoch, list[Action]()
        if epoch is None or not (epoch.entering or self._newcomers.follow):
            return []
        for node in epoch.late_entrants(now):
            actions += self._no_entrant(node, "its links did not open")
        for node, why in self._newcomers.idle(epoch, self._candidates(), now).items():
            actions += self._no_entrant(node, why, is_fault=False) or self._newcomers.fails(
                node, why, is_fault=False
            )
        return actions + self._newcomers.extend(epoch, self._candidates()) if actions else []

    def _leaves_seat(self, epoch: Epoch, node_id: str, why: str, now: float) -> list[Action]:
        """A node that has just entered fails: the others go on without it."""
        self._newcomers.fails(node_id, why)
        self._assigner.vacate(node_id, now)
        over = epoch_over([node_id], epoch.number, why)
        return [*over, *self._lose(epoch, node_id, f"node {node_id} failed as it entered: {why}", now)]

    def _complete_rows(self, epoch: Epoch, now: float) -> list[Action]:
        """Within a step, move hosts of broken rows to seats where they complete other rows."""
        actions: list[Action] = []
        while epoch.phase is Phase.STEPPING and (moves := self._newcomers.move(epoch)):
            outcome: Outcome = []
            for node, seat in moves.items():
                why = f"node {node} makes row {seat.row} whole"
                actions += [epoch.seat_lost(node, why), *epoch_over([node], epoch.number, why)]
                self._assigner.vacate(node, now)
                left = Seat(epoch.replica_of(node), epoch.stage_of(node))
                outcome = epoch.lose(node, now - self._unseen)
                actions += [*epoch.emptied(left), *self._offer_seat(epoch, node, seat, now)]
            assert isinstance(outcome, list), "no row that was whole has lost a node"
            actions += outcome
        return actions

    def _take_seats(self, epoch: Epoch, now: float) -> list[Action]:
        """Within a step, give seats with work to nodes that hold its state."""
        if self.epoch is not epoch or epoch.phase is not Phase.STEPPING:
            return []
        moved = [node for node in epoch.linked if self._newcomers.moves(node)]
        nodes = self._newcomers.holding(epoch)
        if not nodes:
            return []
        self._note_seated(epoch, nodes, now, moved)
        actions = epoch.seat(nodes, now - self._unseen)
        self._standing.noted(epoch, nodes)
        return actions

    def _late_movers(self) -> list[Action]:
        """A step is over: nodes that did not get their new seats in it hold the state of the step before."""
        why = "its links did not open before the step was done"
        return [act for node in self._newcomers.late() for act in self._no_entrant(node, why, is_fault=False)]

    def _note_seated(
        self, epoch: Epoch, nodes: Sequence[str], now: float, moved: Collection[str] = ()
    ) -> None:
        """These nodes are about to take the seats whose links they have opened. Those that `moved` held a
        seat in this step and keep its state, and so their standing."""
        for node in nodes:
            place = epoch.entering[node]
            self._assigner.seat(node, place)
            self._roster.stages[node] = place % epoch.stages
            if node not in moved:
                self._standing.entered(epoch, node, place % epoch.stages)
        if nodes:
            self._departures.placed({*epoch.hosts, *nodes}, now)

    # ---- inside: failures

    def _failed(self, epoch: Epoch, node_id: str, message: StepFailed, now: float) -> list[Action]:
        if message.kind is FailureKind.NON_FINITE:
            return self._not_finite(epoch, node_id, message.message, now)
        if node_id in epoch.fresh and self.plan.follows and epoch.can_lose(node_id):
            return self._leaves_seat(epoch, node_id, message.message, now)
        actions = self._complaint(epoch, node_id, message, now)
        if self.epoch is not epoch:
            return actions
        is_own = other_end(epoch, node_id, message) is None
        if is_own:
            actions += self._stands_out(epoch, node_id, now, failed_at=epoch.step)
        verdict = self._failures.failed(epoch, node_id, message.message, message.step)
        suspects = self._blame.suspects(epoch, node_id, message)
        # One of two neighbours breaks the protocol: only with another partner will it show which.
        replaces = isinstance(verdict, GiveUp) or message.kind is FailureKind.PEER
        again = self._blame.keeps_failing(node_id) or (
            is_own and self._blame.is_set_back(node_id, epoch.step)
        )
        if (replaces or again) and not self._ending.due:
            culprit = self._wrong.leave_out_one(suspects, epoch.step, now, by=node_id)
            if culprit is not None:
                verdict = self._failures.stage_given_up(epoch, culprit, verdict)
        return actions + self._after_failure(epoch, verdict, now)

    def _rows_differ(self, epoch: Epoch, differs: Disagreement | Difference, now: float) -> list[Action]:
        match self._wrong.rows_differ(epoch, differs, now):
            case CallThird(note=note):
                self._newcomers.wait_for_them()
                epoch.pause()
                return [Announce(text=note), *self._between_steps(epoch, now)]
            case Undecided(note=note):
                notes = [Announce(text=note)] if note else []
                return [*notes, *self._voted(epoch, epoch.commit_unaudited(), now)]
            case again:
                verdict = again or self._failures.failed(epoch, min(differs.reported), differs.what)
                return self._after_failure(epoch, verdict, now)

    def _after_failure(self, epoch: Epoch, verdict: Verdict, now: float) -> list[Action]:
        if isinstance(verdict, GiveUp):
            self._ending.give_up(verdict)
        is_told = verdict.note and (isinstance(verdict, GiveUp) or not self._ending.due)
        notes: list[Action] = [Announce(text=verdict.note, about=verdict.culprit)] if is_told else []
        # Links may be broken for good, but what stages hold can be handed in without them.
        stay = {offer.node_id for offer in self._roster.candidates()} >= set(epoch.hosts)
        unsaved = epoch.phase is Phase.APPLYING or self._snapshots.newest < epoch.step
        saves = stay and unsaved and self._ending.saves_once()
        if isinstance(verdict, GiveUp) and not saves:
            return self._end()
        over = [*notes, *self._end_epoch(verdict.kind, verdict.reason)]
        if not saves:
            return over + self._try_place(now)
        nodes = tuple(node for row in epoch.whole_rows for node in epoch.row(row))
        self._assigner.take(nodes, epoch.stages)
        return over + self._begin_epoch(nodes, now)

    def _not_finite(self, epoch: Epoch, node_id: str, what: str, now: float) -> list[Action]:
        """Look for the cause in this order: the node, the codecs, divergence."""
        what = f"{what} at {epoch.place_of(node_id)} is not finite"
        if (again := self._compute_again(epoch, node_id, what, now)) is not None:
            return again
        return self._after_failure(epoch, self._failures.not_finite(epoch, node_id, what), now)

    def _finite_uncompressed(self, epoch: Epoch, now: float) -> Verdict:
        """The codecs are at fault, or the node that reported the step: there may have been no spare then."""
        node_id = self._failures.suspect_node
        is_left_out = bool(node_id) and (
            not epoch.has(node_id)
            or self._wrong.leave_out_one([node_id], epoch.step, now, by=node_id) is not None
        )
        if is_left_out and not self._ending.due:
            return self._failures.finite_without(epoch, node_id)
        return self._failures.finite_uncompressed(epoch)

    def _implausible(self, epoch: Epoch, odd: Implausible, now: float) -> list[Action]:
        """Another node computes the stage again. What it finds too counts; so does what no other can check,
        unless it is absurd."""
        if (again := self._checked(epoch, odd.node_id, odd.what, now)) is not None:
            return again
        loaded, _ = epoch.loaded
        if epoch.is_proving and self._states.held_alone(loaded):
            return self._not_reproduced(epoch, NotReproduced(odd.what, loaded), now)
        is_checked, notes = self._wrong.computed_twice(epoch), []
        if odd.is_trend and not is_checked:
            if odd.is_absurd and not self._ending.due:
                return self._after_failure(epoch, self._failures.absurd(epoch, odd), now)
            if odd.node_id not in self._told_trends:
                self._told_trends.add(odd.node_id)
                line = f"{odd.what}, and no other node is left to compute it again: let one more node join"
                notes = [Announce(text=f"node {odd.node_id}: {line}", about=odd.node_id)]
        return [*notes, *self._voted(epoch, epoch.commit_anyway(confirmed=is_checked), now)]

    def _checked(self, epoch: Epoch, node_id: str, what: str, now: float) -> list[Action] | None:
        """Run the step again because of what a node reports, without it; "" for one that is gone. None if no
        other node can compute that."""
        if node_id:
            return self._compute_again(epoch, node_id, what, now, neighbours=False)
        note = f"step {epoch.step + 1} is not committed: {what}, by a node that is gone; it runs again"
        return self._after_failure(epoch, RunAgain(kind=AbortKind.NOT_FINITE, reason=what, note=note), now)

    def _compute_again(
        self, epoch: Epoch, node_id: str, what: str, now: float, *, neighbours: bool = True
    ) -> list[Action] | None:
        """Run the step again without the node that may be wrong; without `neighbours` only those of its stage
        may be. None if no such node is left to try, or no other node can take its stage."""
        if epoch.uncompressed or self._ending.due:
            self._wrong.nothing_to_try(epoch)
            return None
        verdict = self._wrong.compute_again(epoch, node_id, what, now, neighbours=neighbours)
        return None if verdict is None else self._after_failure(epoch, verdict, now)

    def _settle_doubt(self, epoch: Epoch, now: float) -> list[Action]:
        """A step is committed, which shows who was wrong in earlier attempts at it."""
        actions: list[Action] = []
        for fault in self._wrong.refuted(epoch, now):
            if isinstance(fault, Alone):
                actions.append(Announce(text=fault.note))
                continue
            line = f"node {fault.node_id}: {fault.why}; it gets a stage again only if no other node is left"
            is_out = self._strike(fault.node_id, fault.why, now) if fault.at_fault else []
            actions += is_out or [Announce(text=line, about=fault.node_id)]
        return actions

    def _strike(self, node_id: str, why: str, now: float) -> list[Action]:
        """Hold something against a node; gives what follows if it is shut out for it."""
        return self._shut_out(node_id, now) if self._quarantine.strike(node_id, why) else []

    def _complaint(self, epoch: Epoch, node_id: str, message: StepFailed, now: float) -> list[Action]:
        """Handle a stage's complaint about a neighbour."""
        if self.stopped:
            return []
        accused = self._quarantine.complaint(epoch, node_id, message)
        if accused is None:
            return []
        node, _, why = accused
        if accused.is_proven(self.members):
            return self._shut_out(node, now) if self._quarantine.convict(node, why) else []
        if node not in self.members:
            return []
        # Its neighbours may lie together, so it may come back.
        self._blame.set_back(node, epoch.step)
        why = f"{why}: start it again"
        return [*self._put_out(node, f"node {node} ends: {why}", why, now), *self._try_place(now)]

    def _shut_out(self, node_id: str, now: float) -> list[Action]:
        return self._out(node_id, now) + self._try_place(now)

    def _out(self, node_id: str, now: float) -> list[Action]:
        why = self.quarantined[node_id]
        return self._put_out(node_id, f"node {node_id} is shut out: {why}", f"{QUARANTINED}{why}", now)

    def _put_out(self, node_id: str, line: str, reason: str, now: float) -> list[Action]:
        """End a node's part in the run. The operator reads `line`, and the node reads `reason`."""
        over = run_over([node_id], reason, failed=True)
        return [Announce(text=line, about=node_id), *over, *self._gone(node_id, reason, now)]

    def _replace_straggler(self, node_id: str, line: str, now: float) -> list[Action]:
        """A node that others wait for ends; started again it may help, a few times."""
        if self._quarantine.strike(node_id, line):
            return self._shut_out(node_id, now)
        return self._put_out(node_id, f"node {node_id} is replaced: {line}", line, now)

    def _disputed(self, late: Late) -> Late:
        """If one of two nodes is wrong, one gives up its stage, if others can take it. Else who is late is to
        start again."""
        if self.epoch is None or late.deadlock is None or not late.nodes:
            return late
        node, failure = late.deadlock
        two, able = {node, other_end(self.epoch, node, failure) or node}, self._candidates()
        if any(self._assigner.can_hand_over(member, able) for member in two):
            return replace(late, nodes={})
        return replace(late, deadlock=None)

    def _replaceable(self, late: Mapping[str, str]) -> dict[str, str]:
        """The late nodes that are to be replaced, each with a line. If the run waits for a single node, that
        one is replaced only if another can take its place: its work may simply take long."""
        alone = self.epoch is not None and len(self.epoch.asked) == 1
        able = self._candidates()
        return {
            node: line for node, line in late.items() if not alone or self._assigner.can_hand_over(node, able)
        }

    def _relieve_slow(self, epoch: Epoch, now: float) -> list[Action]:
        """A step is committed: once the stages' state is on disk, faster spares take those of slow nodes."""
        self._stragglers.watch(epoch, now - self._unseen)
        actions: list[Action] = []
        slow_nodes = [slow for slow in self._stragglers.slow(epoch) if slow.node_id not in self._relieved]
        if not slow_nodes or self._ending.due or (self._newcomers.awaited and not self._relieved):
            return actions
        candidates = self._roster.candidates()
        spares = [offer for offer in self._blame.blameless(candidates) if not epoch.has(offer.node_id)]
        for slow in slow_nodes:
            node = slow.node_id
            line = f"node {node} ({epoch.place_of(node)}) is slow: {slow.line}"
            stay = [
                offer
                for offer in candidates
                if epoch.has(offer.node_id) and offer.node_id not in self._relieved
            ]
            faster = [spare for spare in spares if self._is_faster(spare, slow)]
            if (faster or epoch.rows > 1) and self._assigner.can_hand_over(node, [*stay, *faster]):
                self._relieved.append(node)
                self._newcomers.wait_for_them()
                self._stragglers.relieved(slow)
                taker = "a spare takes" if faster else "other rows take"
                line += f"; {taker} its stage, once the state is on disk"
            elif node not in self._told_slow:
                line += "; no other node is there that would be faster"
            else:
                continue
            self._told_slow.add(node)
            actions.append(Announce(text=line, about=node))
        return actions

    def _is_faster(self, spare: Candidate, slow: Slow) -> bool:
        """Whether a spare would be faster, from what it has shown, or else from what both have measured."""
        rate = self.members[slow.node_id].offer.flops
        by_rate = spare.flops / rate if spare.flops and rate else 1.0
        expected = self._stragglers.times.get(spare.node_id, 1 / by_rate)
        return slow.times > FASTER * expected

    def _take_from_slow(self, epoch: Epoch, now: float) -> None:
        """Slow hosts give up their stages, and get one only if no other node is left, for a while."""
        for node_id in self._relieved:
            others = self._blame.blameless(self._roster.candidates())
            if epoch.has(node_id) and self._assigner.hand_over(node_id, others, now):
                self._stragglers.forget(node_id)
                self._blame.set_back(node_id, epoch.step)
        self._relieved.clear()

    # ---- inside: hosts

    def _candidates(self) -> list[Candidate]:
        """The nodes that could host a stage. Nodes that recently gave one up count only if there are too few
        others; slow nodes come after the others."""
        usable, slow = (
            self._blame.usable(self._roster.candidates(), self.plan.min_stages),
            self._stragglers.times,
        )
        return sorted(usable, key=lambda offer: slow.get(offer.node_id, 0.0)) if slow else usable

    def _release(self, node_id: str, now: float) -> list[Action]:
        """Let a node go that asked to."""
        del self._roster.members[node_id]
        return self._unassign(node_id, f"node {node_id} left", now) + let_go(node_id)

    def _gone(self, node_id: str, reason: str, now: float) -> list[Action]:
        if self.stopped or self._roster.members.pop(node_id, None) is None:
            return []
        lost = self._unassign(node_id, f"node {node_id} is gone: {reason}", now)
        return [Released(node_id=node_id, reason=reason), *lost]

    def _unassign(self, node_id: str, reason: str, now: float) -> list[Action]:
        actions = self._newcomers.lost(node_id, self.epoch)
        if self.epoch is not None:
            actions += self.epoch.drop_entrant(node_id)
        findings = self._states.lost(node_id)
        if self._assigner.vacate(node_id, now):
            # Failures that its neighbours reported were caused by its end.
            self._failures.forgive()
        self._stragglers.forget(node_id)
        if self.epoch is not None and self.epoch.has(node_id):
            actions += self._stands_out(self.epoch, node_id, now)
            actions += self._lose(self.epoch, node_id, reason, now)
        # Last: it may end further epochs.
        return actions + self._agreed(findings, now)

    def _lose(self, epoch: Epoch, node_id: str, reason: str, now: float) -> list[Action]:
        """The epoch goes on without a host if it can: nobody else's work is lost."""
        epoch.seat_lost_at = epoch.step
        if not self.plan.follows or not epoch.can_lose(node_id):
            return self._end_epoch(AbortKind.LOST, reason)
        phase, lost = epoch.phase, epoch.seat_lost(node_id, reason)
        outcome = epoch.lose(node_id, now - self._unseen)
        actions: list[Action] = [replace(lost, portions=epoch.portions)]
        actions += epoch.emptied(Seat(lost.row, lost.stage))
        self._newcomers.seat_emptied(epoch, Seat(lost.row, lost.stage))
        actions += self._enter(epoch, now)
        for step in self._snapshots.lost(node_id):
            why = f"node {node_id} is gone and has not handed in its layers"
            actions += self._drop_snapshot(step, why, now)
        if self.epoch is not epoch:
            return actions
        match phase:
            case Phase.STEPPING if epoch.phase is Phase.STEPPING and isinstance(outcome, list):
                actions += outcome + self._complete_rows(epoch, now)
                actions += self._take_seats(epoch, now)
                return actions + self._snapshot_if_wanted(epoch, now, within=True)
            case Phase.STEPPING:
                return actions + self._voted(epoch, outcome, now)
        assert isinstance(outcome, list), "only votes have another outcome"
        match phase:
            case Phase.PLACING if epoch.choose_state():
                return actions + self._state_chosen(epoch, now)
            case Phase.RESTORING | Phase.APPLYING:
                return actions + self._progress(epoch, outcome, now)
            case Phase.VALIDATING:
                return actions + outcome
            case _:
                return actions

    def _stands_out(
        self, epoch: Epoch, node_id: str, now: float, failed_at: int | None = None
    ) -> list[Action]:
        """A host ends, leaves or fails by itself. One that does so far more often than others is set back."""
        if (why := self._departures.ends(node_id, now, failed_at)) is None:
            return []
        if not (steps := self._blame.set_back(node_id, epoch.step, ended=failed_at is None)):
            return []
        line = f"node {node_id}: {why}, and others do not"
        return [
            Announce(
                text=f"{line}; for {steps} steps it gets one only if no other node is left", about=node_id
            )
        ]

    def _end_epoch(self, kind: AbortKind, reason: str) -> list[Action]:
        if (epoch := self._epochs.end()) is None:
            return []
        self._snapshots.epoch_over()
        self._relieved.clear()
        present = [node for node in (*epoch.hosts, *epoch.entering) if node in self.members]
        over = Aborted(epoch=epoch.number, step=epoch.step, kind=kind, reason=reason)
        return [*self._newcomers.epoch_over(), *epoch_over(present, epoch.number, reason), over]

    def _try_place(self, now: float) -> list[Action]:
        """Between epochs: end the run if it is to stop, let go who wants to, start an epoch if it can be."""
        if self.stopped or self.epoch is not None or self._refusing:
            return []
        if self._ending.due:
            return self._end()
        actions = [act for node in self._roster.leaving(self.members) for act in self._release(node, now)]
        candidates = self._candidates()
        nodes = self._assigner.choose(candidates, now)
        if nodes is None:
            news = self._assigner.news(candidates)
            return [*actions, Announce(text=news)] if news is not None else actions
        if self.plan.undecided:
            return [*actions, Decide()]
        return [*actions, *self._begin_epoch(nodes, now)]

    def _begin_epoch(self, nodes: tuple[str, ...], now: float) -> list[Action]:
        self._unseen = 0.0
        self._roster.placed(nodes, self._assigner.rows)
        self._departures.placed(nodes, now)
        assignment = Assignment(
            hosts=nodes,
            addresses=tuple(self.members[node].address if node else "" for node in nodes),
            groups=self._sharing.groups_for(nodes, rows=self._assigner.rows, now=now),
            kinds=self._roster.kinds(nodes),
        )
        newest, suspect = self._snapshots.newest, self._failures.suspect_step
        epoch = self._epochs.begin(assignment, newest_snapshot=newest, suspect_step=suspect, now=now)
        placement = RecordPlacement(
            epoch=epoch.number, nodes=nodes, addresses=assignment.addresses, groups=assignment.groups
        )
        return [placement, *epoch.announce()]

    def _prefetch(self, nodes: Iterable[str]) -> list[Action]:
        if self.plan.undecided:
            return []
        nodes = self._newcomers.others(nodes)
        if self.plan.first_weights and not self._epochs.begun:
            return prefetch_first(nodes, self._roster, self.plan.units(self.plan.stages))
        return prefetch(nodes, self.epoch, self._roster, self._snapshots.newest, self.plan.units)

    def _end(self) -> list[Action]:
        """End the run as was asked for, or for what cannot be mended."""
        reason, failed = self._ending.last_words(self._snapshots.saved_state())
        return self._stop(reason, failed=failed)

    def _stop(self, reason: str, *, failed: bool) -> list[Action]:
        if self.stopped:
            return []
        self.stopped = True
        self._epochs.end()
        done = self._snapshots.newest >= self.plan.total_steps
        self.goodbye = goodbye(reason, failed=failed, done=done, soon=self._ending.soon)
        return [*finish_all(self.members, self.goodbye), Stop(reason=reason, failed=failed)]
