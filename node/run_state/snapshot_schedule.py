"""Which snapshots are due, in progress and stored. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from node.run_state.actions import Action, OpenSnapshot
from node.run_state.epoch import Epoch
from node.run_state.run_plan import RunPlan

HASHES = "#hashes"
"""The name, among the layers that a node must hand in, for its report of hashes. No layer has this name."""
MAX_ASKED = 2
"""How many snapshots may be uploaded at a time. On slower links some are skipped. Each costs its nodes a copy
of their state."""


PATIENCE = 60.0
"""The seconds for a node to hand in its layers, besides the time for their bytes."""
ALONE_TIMES = 15.0
"""How many times longer the run waits if no node has handed in anything, because it may not be the nodes'
fault."""
PATIENCE_TIMES = 4.0
"""How many times longer than the last time a node may take."""
LEAST_UPLOAD_RATE = 62_500.0
"""The bytes per second with which a node's layers are expected to come before anything is measured."""
CHEAP_SECONDS, BEST_PAUSE = 5.0, 10.0
"""A new best state is saved at once if a snapshot takes at most this many seconds, or if this many times its
duration has passed since the last one."""
SLOW_SECONDS = 10.0
"""After this many seconds the operator reads for which nodes a pending snapshot waits."""


@dataclass
class _Asked:
    """A snapshot that is being taken."""

    step: int
    at: float
    missing: dict[str, set[str]]
    """The layers that each node has not handed in."""
    sizes: Mapping[str, int]


class SnapshotSchedule:
    """One run's snapshots, each named by the number of committed steps."""

    def __init__(self, *, every: int, newest: int, seconds: float = 0.0) -> None:
        """`every`: steps between snapshots; or, with `seconds`, that time."""
        self.newest = newest
        """The newest one that is complete and on disk; 0 before there is one."""
        self.awaited = False
        """The run waits until the snapshot asked for last is stored."""
        self._every = every
        self._seconds = seconds
        self._last: float | None = None
        """When the last one was asked for, or the first step ended."""
        self._asked: list[_Asked] = []
        """What the epoch asked for and is not stored yet."""
        self._took: dict[str, float] = {}
        """Seconds that each node's last layers took."""
        self._lasted = 0.0
        """Seconds that the last one took of which all layers were handed in."""
        self._best_waits = False
        """A best state was not saved: the next one that is taken is measured."""
        self._measured = 0
        """The step of the newest one that is measured for that."""
        self._is_told = False
        self._requested = False
        self._again: set[int] = set()
        """Steps whose snapshots were not taken, and are to be when the run comes there again."""
        self._damaged = 0
        """A damaged snapshot with no older intact one to fall back on; 0 for none."""

    @property
    def idle(self) -> bool:
        """Whether no snapshot is being taken."""
        return not self._asked

    def request(self) -> None:
        """Take the next possible one, due or not."""
        self._requested = True

    def due(self, step: int, now: float) -> bool:
        """Whether the run file asks for one after this step, or nodes differed on its state."""
        if step in self._again:
            return True
        if not self._seconds:
            return step % self._every == 0
        if self._last is None:
            self._last = now
        return now - self._last >= self._seconds

    def again(self, step: int) -> None:
        """The run goes back to before this step, and takes its snapshot when it is there again."""
        self._again.add(step)

    def wanted(self, step: int, now: float) -> bool:
        """Whether to take one now, while the next steps run."""
        if not self.due(step, now) and not self._requested:
            return False
        return self.newest < step and len(self._asked) < MAX_ASKED

    def wanted_or_due(self, step: int, now: float) -> bool:
        """Whether one is asked for after this step, also where it cannot be taken now."""
        return self.due(step, now) or self._requested

    def room(self, step: int) -> bool:
        """Whether the state of `step` can be saved beside the next steps, and is not yet."""
        taken = any(asked.step == step for asked in self._asked)
        return self.newest < step and not taken and len(self._asked) < MAX_ASKED

    def saves_best(self, step: int, now: float) -> bool:
        """A new best was measured: whether to save it now. Over lines too slow for that the next due snapshot
        is measured, which may be the best of those that are kept."""
        if self.newest >= step or any(asked.step == step for asked in self._asked):
            return False
        took = max([self._lasted, *(now - asked.at for asked in self._asked)])
        idle = not self._asked and (self._last is None or now - self._last >= BEST_PAUSE * took)
        at_once = self.room(step) and (took <= CHEAP_SECONDS or idle)
        self._best_waits = not at_once
        return at_once

    def is_measured(self, step: int) -> bool:
        """Whether the held-out loss of this step's state is wanted because its snapshot may be the best."""
        return step > 0 and step == self._measured

    def reachable(self, step: int) -> bool:
        """Whether the state of `step` is saved, or can be."""
        return self.newest == step or self.room(step)

    def ask(
        self,
        step: int,
        layers: Mapping[str, Collection[str]],
        sizes: Mapping[str, int],
        *,
        await_it: bool,
        now: float,
    ) -> None:
        """One is being taken, `layers` and their bytes by node; with `await_it` the run waits until it is
        stored."""
        missing = {node: set(units) for node, units in layers.items()}
        self._asked.append(_Asked(step, now, missing, sizes))
        self._is_told = False
        self._last = now
        if self._best_waits:
            self._best_waits, self._measured = False, step
        if await_it:
            self.awaited = True
        else:
            self._requested = False

    def take(self, epoch: Epoch, plan: RunPlan, now: float, *, await_it: bool) -> list[Action]:
        """Take one of the state that every stage holds now, as `ask` says."""
        # Rows take turns: each has the whole state, and a snapshot costs its nodes a copy and upload.
        rows = epoch.proven_rows
        replica = rows[epoch.step // plan.snapshot_every % len(rows)]
        nodes = epoch.row(replica)
        # All say what they hold; one row hands it in.
        layers: dict[str, Collection[str]] = {node: (HASHES,) for node in epoch.hosts}
        for node, units in zip(nodes, plan.units(epoch.stages), strict=True):
            layers[node] = (HASHES, *units)
        of_stages = plan.state_bytes(epoch.stages)
        sizes = {node: of_stages[epoch.stage_of(node)] for node in epoch.hosts}
        self.ask(epoch.step, layers, sizes, await_it=await_it, now=now)
        return [OpenSnapshot(step=epoch.step), *epoch.take_snapshot(replica)]

    def lost(self, node_id: str) -> list[int]:
        """A node is gone. Gives the snapshots of which it has not handed in its layers."""
        missing = [(asked.step, asked.missing.pop(node_id, set())) for asked in self._asked]
        return [step for step, units in missing if units - {HASHES}]

    def stored(self, step: int) -> None:
        self.newest = max(self.newest, step)
        self._again = {at for at in self._again if at > step}
        self._asked = [asked for asked in self._asked if asked.step > self.newest]

    def refused(self, step: int) -> bool:
        """A node handed in what is no layer of this one: another snapshot is taken as soon as possible.

        False if this one is not under way.
        """
        if not any(asked.step == step for asked in self._asked):
            return False
        self._asked = [asked for asked in self._asked if asked.step != step]
        self._requested = True
        return True

    def layer_received(self, step: int, unit: str, now: float) -> None:
        """A node has handed in a layer, which is not yet on disk."""
        for asked in self._asked:
            if asked.step != step:
                continue
            for node, units in list(asked.missing.items()):
                units.discard(unit)
                self._look_done(asked, node, now)

    def hashes_said(self, step: int, node_id: str, now: float) -> None:
        """A node has said what it holds after `step` steps."""
        for asked in self._asked:
            if asked.step == step and node_id in asked.missing:
                asked.missing[node_id].discard(HASHES)
                self._look_done(asked, node_id, now)

    def go_on(self) -> None:
        """The run no longer waits for a snapshot."""
        self.awaited = False

    def drop(self, step: int) -> None:
        """The snapshot of `step` is not taken."""
        self._asked = [asked for asked in self._asked if asked.step != step]
        if not self._asked:
            self.awaited = False

    def _look_done(self, asked: _Asked, node: str, now: float) -> None:
        if not asked.missing[node]:
            del asked.missing[node]
            self._took[node] = now - asked.at
        if not asked.missing:
            self._lasted = now - asked.at

    def overdue(self, now: float) -> tuple[dict[str, str], str | None]:
        """Nodes that had time enough to hand in their layers, with a line for each; a note for the
        operator."""
        late: dict[str, str] = {}
        note = None
        for asked in self._asked:
            waited = now - asked.at
            times = ALONE_TIMES if len(asked.missing) == len(asked.sizes) else 1.0
            for node in asked.missing:
                if waited > times * self._patience(node, asked.sizes[node]):
                    late[node] = f"it did not hand in its layers of step {asked.step} within {waited:.0f} s"
            if self.awaited and waited > SLOW_SECONDS and asked.missing and not self._is_told:
                self._is_told = True
                note = f"the snapshot of step {asked.step} waits for node {', node '.join(asked.missing)}"
        return late, note

    def _patience(self, node_id: str, size: int) -> float:
        if (took := self._took.get(node_id)) is not None:
            return max(PATIENCE, PATIENCE_TIMES * took)
        return PATIENCE + size / LEAST_UPLOAD_RATE

    def damaged(self, step: int, whole: int) -> None:
        """The snapshot of `step` is damaged; `whole` is the newest intact one, 0 for none.

        If it was the newest, take another after the next step: until then a failure costs many steps.
        """
        if step != self.newest:
            return
        self._damaged = 0 if whole else step
        self.newest = whole or step
        self._requested = True

    def epoch_over(self) -> None:
        """Uploads of the epoch may never complete."""
        self.awaited = False
        self._asked.clear()

    def saved_state(self) -> str:
        """What is on disk, for the operator of a run that ends."""
        if not self.newest:
            return "no snapshot is complete yet"
        if self.newest == self._damaged:
            return f"the snapshot of step {self.newest} is damaged and no older one is whole"
        return f"the snapshot of step {self.newest} is intact"
