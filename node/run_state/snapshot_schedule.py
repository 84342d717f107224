"""Which snapshots are due, in progress and stored. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from node.run_state.actions import Action, OpenSnapshot
from node.run_state.epoch import Epoch
from node.run_state.run_plan import RunPlan

HASHES = "#hashes"
"""The name of a node's report of hashes among the layers that it must hand in. No layer has this name."""
MAX_ASKED = 2
"""The most snapshots that are uploaded at a time. On slow links, some are skipped. Each costs its nodes a
copy of their state."""


PATIENCE = 60.0
"""The seconds for a node to hand in its layers, in addition to the time for their bytes."""
ALONE_TIMES = 15.0
"""The factor by which the run waits longer if no node has handed in anything, which may not be the nodes'
fault."""
PATIENCE_TIMES = 4.0
"""The multiple of its last time that a node may take."""
LEAST_UPLOAD_RATE = 62_500.0
"""The assumed bytes per second of a node's layers before anything is measured."""
CHEAP_SECONDS, BEST_PAUSE = 5.0, 10.0
"""A new best state is saved immediately if a snapshot takes at most this many seconds, or if this multiple of
its duration has passed since the last one."""
SLOW_SECONDS = 10.0
"""After this many seconds, the operator is told for which nodes a pending snapshot waits."""


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
        """`every`: the steps between snapshots. With `seconds`, that time counts instead."""
        self.newest = newest
        """The newest snapshot that is complete and on disk; 0 before there is one."""
        self.awaited = False
        """Whether the run waits until the newest requested snapshot is stored."""
        self._every = every
        self._seconds = seconds
        self._last: float | None = None
        """When the last one was requested, or the first step ended."""
        self._asked: list[_Asked] = []
        """The snapshots that the epoch requested and that are not stored yet."""
        self._took: dict[str, float] = {}
        """The seconds that each node's last layers took."""
        self._lasted = 0.0
        """The seconds of the last snapshot of which all layers were handed in."""
        self._best_waits = False
        """Whether a best state was not saved, so that the next snapshot's state is measured."""
        self._measured = 0
        """The newest step that is measured for that reason."""
        self._is_told = False
        self._requested = False
        self._again: set[int] = set()
        """Steps whose snapshots were not taken, and will be when the run reaches them again."""
        self._dropped: set[int] = set()
        """Steps whose newest snapshot was not taken."""
        self._damaged = 0
        """The step of a damaged snapshot without an older intact one to return to; 0 for none."""

    @property
    def idle(self) -> bool:
        """Whether no snapshot is being taken."""
        return not self._asked

    def request(self) -> None:
        """Take the next possible snapshot, due or not."""
        self._requested = True

    def due(self, step: int, now: float) -> bool:
        """Whether the run file requires one after this step, or nodes differed on its state."""
        if step in self._again:
            return True
        if not self._seconds:
            return step % self._every == 0
        if self._last is None:
            self._last = now
        return now - self._last >= self._seconds

    def again(self, step: int) -> None:
        """The run returns to before this step. Take its snapshot when it is reached again."""
        self._again.add(step)

    def wanted(self, step: int, now: float) -> bool:
        """Whether to take one now, during the next steps."""
        if not self.due(step, now) and not self._requested:
            return False
        return self.newest < step and len(self._asked) < MAX_ASKED

    def wanted_or_due(self, step: int, now: float) -> bool:
        """Whether one is requested after this step, even if it cannot be taken now."""
        return self.due(step, now) or self._requested

    def room(self, step: int) -> bool:
        """Whether the state of `step` can be saved during the next steps, and is not saved yet."""
        taken = any(asked.step == step for asked in self._asked)
        return self.newest < step and not taken and len(self._asked) < MAX_ASKED

    def saves_best(self, step: int, now: float) -> bool:
        """A new best loss was measured. Returns whether to save the state now. On lines that are too slow,
        the next due snapshot is measured instead, which may be the best one that is kept."""
        if self.newest >= step or any(asked.step == step for asked in self._asked):
            return False
        took = max([self._lasted, *(now - asked.at for asked in self._asked)])
        idle = not self._asked and (self._last is None or now - self._last >= BEST_PAUSE * took)
        at_once = self.room(step) and (took <= CHEAP_SECONDS or idle)
        self._best_waits = not at_once
        return at_once

    def is_measured(self, step: int) -> bool:
        """Whether to measure the held-out loss of this step's state, because its snapshot may be the best."""
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
        within: bool = False,
    ) -> None:
        """A snapshot is being taken, with `layers` and their bytes by node. With `await_it`, the run waits
        until it is stored. `within` the next step, its state cannot be measured any more."""
        missing = {node: set(units) for node, units in layers.items()}
        self._asked.append(_Asked(step, now, missing, sizes))
        self._dropped.discard(step)
        self._is_told = False
        self._last = now
        if self._best_waits and not within:
            self._best_waits, self._measured = False, step
        if await_it:
            self.awaited = True
        else:
            self._requested = False

    def take(self, epoch: Epoch, plan: RunPlan, now: float, *, await_it: bool, within: bool) -> list[Action]:
        """Take one of the state that every stage holds now, as `ask` says."""
        # Rows take turns: each has the complete state, and a snapshot costs its nodes a copy and an upload.
        rows = epoch.checked_rows
        replica = rows[epoch.step // plan.snapshot_every % len(rows)]
        nodes = epoch.row(replica)
        # All report what they hold, and one row hands it in.
        layers: dict[str, Collection[str]] = {node: (HASHES,) for node in epoch.hosts}
        for node, units in zip(nodes, plan.units(epoch.stages), strict=True):
            layers[node] = (HASHES, *units)
        of_stages = plan.state_bytes(epoch.stages)
        sizes = {node: of_stages[epoch.stage_of(node)] for node in epoch.hosts}
        self.ask(epoch.step, layers, sizes, await_it=await_it, now=now, within=within)
        return [OpenSnapshot(step=epoch.step), *epoch.take_snapshot(replica)]

    def lost(self, node_id: str) -> list[int]:
        """A node is gone. Returns the snapshots for which it has not handed in its layers."""
        missing = [(asked.step, asked.missing.pop(node_id, set())) for asked in self._asked]
        return [step for step, units in missing if units - {HASHES}]

    def stored(self, step: int) -> None:
        self.newest = max(self.newest, step)
        self._again = {at for at in self._again if at > step}
        self._dropped = {at for at in self._dropped if at > step}
        self._asked = [asked for asked in self._asked if asked.step > self.newest]

    def refused(self, step: int) -> bool:
        """A node handed in something that is not a layer of this snapshot. Take another one as soon as
        possible. Returns False if this one is not in progress.
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

    def hashes_reported(self, step: int, node_id: str, now: float) -> None:
        """A node has reported its hashes after `step` steps."""
        for asked in self._asked:
            if asked.step == step and node_id in asked.missing:
                asked.missing[node_id].discard(HASHES)
                self._look_done(asked, node_id, now)

    def go_on(self) -> None:
        """The run no longer waits for a snapshot."""
        self.awaited = False

    def drop(self, step: int) -> bool:
        """The snapshot of `step` is not taken. Returns whether this attempt at it was not dropped before."""
        first = step not in self._dropped
        self._dropped.add(step)
        self._asked = [asked for asked in self._asked if asked.step != step]
        if not self._asked:
            self.awaited = False
        return first

    def _look_done(self, asked: _Asked, node: str, now: float) -> None:
        if not asked.missing[node]:
            del asked.missing[node]
            self._took[node] = now - asked.at
        if not asked.missing:
            self._lasted = now - asked.at

    def overdue(self, now: float) -> tuple[dict[str, str], str | None]:
        """Nodes that had enough time to hand in their layers, with a line for each, and a line for the
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
        """The snapshot of `step` is damaged. `whole`: the newest intact one; 0 for none.

        If it was the newest, take another one after the next step, because until then a failure costs many
        steps.
        """
        if step != self.newest:
            return
        self._damaged = 0 if whole else step
        self.newest = whole or step
        self._requested = True

    def epoch_over(self) -> None:
        """The epoch is over, so its uploads may never complete."""
        self.awaited = False
        self._asked.clear()

    def saved_state(self) -> str:
        """What is on disk, in words for the operator of a run that ends."""
        if not self.newest:
            return "no snapshot is complete yet"
        if self.newest == self._damaged:
            return f"the snapshot of step {self.newest} is damaged and no older one is usable"
        return f"the snapshot of step {self.newest} is intact"
