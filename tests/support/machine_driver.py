"""Drives a `RunMachine` through a run whose nodes answer at once, up to the moment a test is about."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import TypeVar

from node.run_state.actions import Action, OpenSnapshot, RecordPlacement, Send, StepDone, Stop
from node.run_state.codec_control import CodecControl, no_codecs
from node.run_state.epoch import Epoch, Phase
from node.run_state.held_out import HeldOutPass
from node.run_state.machine import RunMachine
from node.run_state.run_plan import Past, RunPlan
from node.run_state.stage_assignment import Candidate, StageBytes
from node.run_state.storage_control import StorageControl, no_choice
from node.schedule.routing import neighbours
from node.tuning.codec_plan import CodecPlan
from node.tuning.decisions import StepHistory
from node.tuning.storage_choice import StoragePlan
from wire.messages import (
    Abort,
    Applied,
    Begin,
    Commit,
    CoordinatorMessage,
    FailureKind,
    Finish,
    Follow,
    Following,
    FollowStep,
    Placed,
    Prefetch,
    Ready,
    Restore,
    StateHashes,
    StepFailed,
    UnitHash,
    Validated,
    Vote,
)
from wire.telemetry import Telemetry

ActionT = TypeVar("ActionT", bound=Action)

SILENT, RECONNECT, REGROUP = 15.0, 1.0, 10.0
UNITS = ("embed", "block.0", "block.1", "block.2", "block.3", "head")


def units_of(stages: int) -> list[tuple[str, ...]]:
    """An even split of `UNITS`."""
    return [UNITS[s * len(UNITS) // stages : (s + 1) * len(UNITS) // stages] for s in range(stages)]


@cache
def unit_numbers(stages: int) -> list[frozenset[int]]:
    return [frozenset(map(UNITS.index, units)) for units in units_of(stages)]


def step_plan(step: int, norm: float) -> tuple[float, float]:
    return 1.0 / (1.0 + norm), 0.5 + step


def of_kind(actions: Sequence[Action], kind: type[ActionT]) -> list[ActionT]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: Sequence[Action], node_id: str | None = None) -> list[CoordinatorMessage]:
    """Messages to one node, or to all."""
    return [a.message for a in of_kind(actions, Send) if node_id in (None, a.node_id)]


def stop_of(actions: Sequence[Action]) -> Stop:
    (stop,) = of_kind(actions, Stop)
    return stop


class Driver:
    """`time` is the clock; every method gives the actions of its last event."""

    def __init__(
        self,
        *,
        stages: int = 3,
        min_stages: int | None = None,
        steps: int = 20,
        every: int = 5,
        past: Past | None = None,
        memory: dict[str, int] | None = None,
        fits: Mapping[str, Mapping[str, float]] | None = None,
        groups: int = 1,
        codecs: Callable[[StepHistory[CodecPlan], int], CodecControl] = no_codecs,
        storages: Callable[[StepHistory[StoragePlan], StageBytes], StorageControl] = no_choice,
        follows: bool = False,
        first_weights: bool = False,
    ) -> None:
        """`groups` are also the most rows; `fits`: by node, seconds with each storage that fits in it."""
        self.plan = RunPlan(
            stages=stages,
            groups=groups,
            most_rows=groups,
            follows=follows,
            min_stages=stages if min_stages is None else min_stages,
            total_steps=steps,
            first_weights=first_weights,
            snapshot_every=every,
            silent_seconds=SILENT,
            reconnect_seconds=RECONNECT,
            regroup_seconds=REGROUP,
            units=units_of,
            unit_numbers=unit_numbers,
            codecs=codecs,
            storages=storages,
            neighbours=lambda stage, stages: neighbours(stage, stages, 1, True),
            stage_bytes=lambda count, _devices: [len(units) for units in units_of(count)],
        )
        self.machine = RunMachine(self.plan, step_plan, past if past is not None else Past())
        self.time = 100.0
        self._memory = memory or {}
        self._fits = fits or {}
        self.kinds: dict[str, str] = {}
        """Of nodes, by name; "" if not given."""
        self.rates: dict[str, float] = {}
        """Measured rates of nodes, by name; 0 if not given."""
        self.owners: dict[str, str] = {}
        """What owners call their nodes, by name; "" if not given."""
        self._nonces: dict[str, int] = {}
        self._went_on: list[Action] = []
        """What the newest vote did, if it began the next step."""
        self.lineage = 0
        """The default lineage of the states that nodes report."""

    def restart(self) -> None:
        """A new machine, by the plan as it is now."""
        self.machine = RunMachine(self.plan, step_plan, Past())

    # ---- events

    def hello(self, node_id: str, *, epoch: int = 0, again: bool = False) -> list[Action]:
        """`again`: as another process than before."""
        nonce = self._nonces.setdefault(node_id, 1) + again
        self._nonces[node_id] = nonce
        return self.machine.hello(
            Candidate(
                node_id=node_id,
                memory_bytes=self._memory.get(node_id, 0),
                kind=self.kinds.get(node_id, ""),
                flops=self.rates.get(node_id, 0.0),
                owner=self.owners.get(node_id, ""),
            ),
            address=f"{node_id}:1",
            process_nonce=nonce,
            epoch=epoch,
            now=self.time,
        )

    def join(self, nodes: str) -> list[Action]:
        actions: list[Action] = []
        for node_id in nodes:
            actions = self.hello(node_id)
        return actions

    def tick(self, seconds: float) -> list[Action]:
        """Advance the clock; every connected node has been heard from."""
        self.time += seconds
        for node_id in self.machine.members:
            self.machine.heard(node_id, self.time)
        return self.machine.tick(self.time)

    def die(self, node_id: str) -> list[Action]:
        assert self.machine.disconnected(node_id, self.time) == []
        return self.tick(RECONNECT + 0.1)

    def leave(self, node_id: str) -> list[Action]:
        return self.machine.leave(node_id, self.time)

    def stop(self, *, at_once: bool = False) -> list[Action]:
        return self.machine.stop("asked to stop", at_once=at_once)

    def stored(self, step: int) -> list[Action]:
        return self.machine.snapshot_stored(step, self.time)

    # ---- what nodes say

    @property
    def epoch(self) -> Epoch:
        assert self.machine.epoch is not None
        return self.machine.epoch

    def placed(
        self, node_id: str, held: int = -1, *, voted: bool = False, lineage: int | None = None
    ) -> list[Action]:
        lineage = self.lineage if lineage is None else lineage
        answer = Placed(
            epoch=self.epoch.number,
            held_step=held,
            voted=voted,
            lineage=lineage,
            storages=self._fits.get(node_id, {}),
        )
        actions = self.machine.message(node_id, answer, self.time)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Restore):
                self.lineage = action.message.lineage
        return actions

    def ready(self, node_id: str) -> list[Action]:
        answer = Ready(epoch=self.epoch.number, telemetry=Telemetry())
        return self.machine.message(node_id, answer, self.time)

    def vote(
        self,
        node_id: str,
        norm: float = 1.0,
        loss: float | None = None,
        times: Mapping[str, float] | None = None,
        sums: bytes = b"",
    ) -> list[Action]:
        """
        Args:
            times: seconds by kind that the node has spent in this epoch.
            sums: the digest of its sum of its first layer unit.
        """
        epoch, losses = self.epoch, {}
        stage = epoch.stage_of(node_id)
        if loss is None and stage == epoch.stages - 1:
            loss = 2.0
        if loss is not None and self.plan.groups > 1:
            losses = dict.fromkeys(epoch.groups_of(epoch.replica_of(node_id)), loss / self.plan.groups)
            loss = None
        first, *others = sorted(unit_numbers(epoch.stages)[stage])
        norms = {first: norm, **dict.fromkeys(others, 0.0)}
        answer = Vote(
            epoch=epoch.number,
            step=epoch.step,
            norms=norms,
            loss=loss,
            group_losses=losses,
            telemetry=Telemetry(seconds=times or {}),
            generation=epoch.generation,
            sums={first: sums} if sums else {},
        )
        actions = self.machine.message(node_id, answer, self.time)
        self._went_on = actions if of_kind(actions, StepDone) else []
        return actions

    def holds(
        self,
        node_id: str,
        state: str = "right",
        *,
        step: int | None = None,
        weights: float = 1.0,
        squares: float = 1.0,
    ) -> list[Action]:
        """It says what its layers are. `state`: a name, for one hash a layer."""
        epoch = self.epoch
        units = unit_numbers(epoch.stages)[epoch.stage_of(node_id)]
        step = epoch.step if step is None else step
        hashes = {
            unit: UnitHash(sha256(f"{state} {unit}".encode()).hexdigest(), weights, 1.0, squares)
            for unit in units
        }
        return self.machine.message(
            node_id, StateHashes(epoch=epoch.number, step=step, units=hashes), self.time
        )

    def applied(self, node_id: str) -> list[Action]:
        """Of a step that the next one followed at once, what its last vote did."""
        if self._went_on:
            return self._went_on
        answer = Applied(epoch=self.epoch.number, step=self.epoch.step, telemetry=Telemetry())
        return self.machine.message(node_id, answer, self.time)

    def validating(self, every: int, *passes: HeldOutPass) -> "Driver":
        """From now on the held-out loss is measured every `every` steps, by default in one pass."""
        passes = passes or (HeldOutPass(number=1, microbatches=2),)
        self.plan = self.machine.plan = replace(self.plan, valid_every=every, held_out=passes)
        return self

    def validated(self, node_id: str, loss: float = 2.0, *, number: int = 1) -> list[Action]:
        epoch = self.epoch
        answer = Validated(
            epoch=epoch.number,
            step=epoch.step,
            number=number,
            loss=loss if node_id == epoch.asked[-1] else None,
            telemetry=Telemetry(),
        )
        return self.machine.message(node_id, answer, self.time)

    def all_validated(self, loss: float = 2.0, *, number: int = 1) -> list[Action]:
        actions: list[Action] = []
        for node_id in self.epoch.asked:
            actions = self.validated(node_id, loss, number=number)
        return actions

    def following(self, node_id: str, snapshot: int, step: int, *, failed: str = "") -> list[Action]:
        answer = Following(snapshot=snapshot, step=step, failed=failed)
        return self.machine.message(node_id, answer, self.time)

    def failed(
        self,
        node_id: str,
        kind: FailureKind = FailureKind.LINK,
        *,
        why: str = "it broke",
        peer: int = -1,
        step: int | None = None,
    ) -> list[Action]:
        """`step`: the one that the node is at, if that is not the epoch's."""
        at = self.epoch.step if step is None else step
        answer = StepFailed(epoch=self.epoch.number, step=at, kind=kind, message=why, peer_stage=peer)
        return self.machine.message(node_id, answer, self.time)

    # ---- stretches of a run

    def all_placed(self, held: int = -1, *, voted: bool = False) -> list[Action]:
        actions: list[Action] = []
        for node_id in self.epoch.hosts:
            actions = self.placed(node_id, held, voted=voted)
        return actions

    def all_ready(self) -> list[Action]:
        actions: list[Action] = []
        for node_id in self.epoch.hosts:
            actions = self.ready(node_id)
        return actions

    def all_vote(self, losses: Mapping[str, float] = {}) -> list[Action]:
        """`losses`: of nodes that report others than the rest."""
        actions: list[Action] = []
        for node_id in self.epoch.hosts:
            actions = self.vote(node_id, loss=losses.get(node_id))
            if self._went_on:
                break
        return actions

    def all_applied(self) -> list[Action]:
        actions: list[Action] = []
        for node_id in self.epoch.hosts:
            actions = self.applied(node_id)
        return actions

    def step(self) -> list[Action]:
        """What the last vote on a step and the end of the step lead to."""
        voted = self.all_vote()
        return voted if self._went_on else voted + self.all_applied()

    def restored(self, held: int = -1) -> list[Action]:
        self.all_placed(held)
        return self.all_ready()

    def steps(self, count: int, *, store: bool = True) -> list[Action]:
        """Run steps; `store`: every snapshot that is asked for is on disk before the next step ends."""
        actions: list[Action] = []
        for _ in range(count):
            self.all_vote()
            actions = self.all_applied()
            for asked in of_kind(actions, OpenSnapshot):
                if store:
                    self.stored(asked.step)
        return actions

    def started(self, nodes: str, steps: int = 0) -> "Driver":
        """In step `steps` of a new run on these nodes."""
        self.join(nodes)
        self.restored()
        self.steps(steps)
        assert self.epoch.phase is Phase.STEPPING and self.epoch.step == steps
        return self

    def into(self, phase: Phase) -> "Driver":
        """From step 2 of 3, with nothing on disk, into another phase; IDLE waits for the last snapshot."""
        assert self.epoch.phase is Phase.STEPPING
        assert (self.epoch.step, self.plan.total_steps, self.machine.newest_snapshot) == (2, 3, 0)
        match phase:
            case Phase.PLACING:
                self.failed(self.epoch.hosts[0])
            case Phase.RESTORING:
                self.failed(self.epoch.hosts[0])
                self.all_placed(2)
            case Phase.APPLYING:
                self.all_vote()
            case Phase.VALIDATING:
                self.validating(100).all_vote()
                self.all_applied()
            case Phase.IDLE:
                self.all_vote()
                self.all_applied()
            case Phase.STEPPING:
                pass
        assert self.epoch.phase is phase
        return self


def begins(actions: Sequence[Action], node_id: str | None = None) -> list[Begin]:
    """Begins of steps for one node, or for all: alone, or with the commit of the step before."""
    found = [one.then if isinstance(one, Commit) else one for one in sent(actions, node_id)]
    return [one for one in found if isinstance(one, Begin)]


def placement_of(actions: Sequence[Action]) -> tuple[str, ...]:
    (placement,) = of_kind(actions, RecordPlacement)
    return placement.nodes


def aborts(actions: Sequence[Action]) -> list[str]:
    """The nodes that learn that an epoch is over."""
    return [a.node_id for a in of_kind(actions, Send) if isinstance(a.message, Abort)]


def finishes(actions: Sequence[Action]) -> dict[str, str]:
    """The nodes that get Finish, and the reason of each."""
    return {a.node_id: a.message.reason for a in of_kind(actions, Send) if isinstance(a.message, Finish)}


def prefetches(actions: Sequence[Action]) -> dict[str, Prefetch]:
    return {a.node_id: a.message for a in of_kind(actions, Send) if isinstance(a.message, Prefetch)}


def restore_of(actions: Sequence[Action]) -> Restore:
    """The one state that all stages load."""
    (restore,) = {message for message in sent(actions) if isinstance(message, Restore)}
    return restore


def follows(actions: Sequence[Action]) -> dict[str, list[Follow | FollowStep]]:
    """What each newcomer is told, in order."""
    found: dict[str, list[Follow | FollowStep]] = {}
    for action in of_kind(actions, Send):
        if isinstance(action.message, Follow | FollowStep):
            found.setdefault(action.node_id, []).append(action.message)
    return found
