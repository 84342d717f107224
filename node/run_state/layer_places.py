"""Which nodes hold which layers of the snapshots that are kept on nodes. Pure.

A snapshot is complete when every layer is on `COPIES` machines, or on all machines if there are fewer. The
nodes of a stage hold its layers first, and other nodes are asked to fetch copies from them. Nodes report the
files on their disks when they connect, and whenever these change. Layers are identified by their SHA-256.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from node.state.manifest import UnitEntry, unit_file
from wire.messages import HeldLayer

COPIES = 2
MOST_UNDER_WAY = 3
"""The most incomplete snapshots. If there are more, the oldest is dropped."""
PATIENCE = 60.0
"""The seconds for a node to fetch a copy, in addition to the time for its bytes. Then another node is
asked."""
LEAST_RATE = 62_500.0
"""The least expected rate of a copy, in bytes per second."""


@dataclass
class _Layer:
    makers: tuple[str, ...] = ()
    """Nodes that hold the state itself. One of them must first report the file. In an object store, the first
    one saves it."""
    agreed: str = ""
    """The SHA-256 that the file must have; empty until it is agreed on."""
    reported: dict[str, HeldLayer] = field(default_factory=dict)
    """The makers' reports about the file before the agreement."""
    entry: UnitEntry | None = None
    files: dict[str, HeldLayer] = field(default_factory=dict)
    """The report of each node about its copy, for nodes that have the agreed file."""
    holders: set[str] = field(default_factory=set)
    """The nodes that have the agreed file."""
    asked: dict[str, float] = field(default_factory=dict)
    """Nodes that were asked for a copy, and when."""
    refused: dict[str, float] = field(default_factory=dict)
    """Nodes that could not store a copy, and when."""
    late: set[str] = field(default_factory=set)
    """Nodes that were asked for a copy, and said nothing for as long as it takes."""
    doubts: set[tuple[str, str]] = field(default_factory=set)
    """Nodes that got no good copy, each with the holder of that copy."""

    def is_safe(self, present: Collection[str], now: float) -> bool:
        """Whether enough nodes hold the file. Those that say nothing do not keep the run waiting."""
        prompt = [node for node in present if node not in self.late]
        return len(self.holders & set(present)) >= self.enough(prompt, now)

    def enough(self, present: Collection[str], now: float) -> int:
        """The number of copies that there should be if these nodes are connected."""
        able = [node for node in present if node in self.holders or not self._refuses(node, now)]
        return min(COPIES, max(1, len(able)))

    def next_holder(self, present: Sequence[str], load: Mapping[str, int], now: float) -> str | None:
        """The node to ask for a copy: the one that holds the least of this snapshot, and among equals the
        next one in the ring."""
        held = self.holders & set(present)
        if self.entry is None or not held:
            return None
        pending = {node for node, at in self.asked.items() if now - at <= self._patience} & set(present)
        if len(held | pending) >= self.enough(present, now):
            return None
        candidates = [node for node in present if node not in held | pending and not self._refuses(node, now)]
        first = present.index(min(held, key=present.index))

        def order(node: str) -> tuple[bool, int, int]:
            return node in self.asked, load[node], (present.index(node) - first) % len(present)

        return min(candidates, key=order, default=None)

    def forget(self, node_id: str) -> None:
        """The node holds no file."""
        self.holders.discard(node_id)
        if self.files.pop(node_id, None) is not None and self.files:
            self._weigh()

    def note(self, node_id: str, file: HeldLayer) -> None:
        """The node has the agreed file."""
        self.files[node_id] = _described(file, self.files.pop(node_id, None))
        self._weigh()

    def _weigh(self) -> None:
        """Use the description of the file that most makers report, because the first may lie; among equals
        the earliest. The word of other nodes, of which anybody may be some, changes it only if there are no
        makers."""
        files = [file for node, file in self.files.items() if node in self.makers or not self.makers]
        if files:
            size = Counter(file.bytes for file in files).most_common(1)[0][0]
            digests = [file.weights_sha256 for file in files if file.bytes == size and file.weights_sha256]
            self.entry = UnitEntry(
                unit=files[0].unit,
                file=unit_file(files[0].unit),
                bytes=size,
                sha256=files[0].sha256,
                weights_sha256=next((digest for digest, _ in Counter(digests).most_common(1)), ""),
            )
        assert self.entry is not None, "a maker reports the file first"
        self.holders = {node for node, file in self.files.items() if file.bytes == self.entry.bytes}

    @property
    def _patience(self) -> float:
        return PATIENCE + (self.entry.bytes / LEAST_RATE if self.entry is not None else 0.0)

    def _refuses(self, node_id: str, now: float) -> bool:
        at = self.refused.get(node_id)
        return at is not None and now - at <= self._patience


@dataclass
class _Snapshot:
    layers: dict[str, _Layer]
    complete: bool = False
    url: str = ""
    """The object store's folder with its layers; empty if nodes hold them."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to a node to hold copies of these units."""

    node_id: str
    step: int
    units: tuple[str, ...]


class LayerPlaces:
    """All snapshots of a run that nodes hold, complete or not. Times are on any monotonic clock."""

    def __init__(self, units: Sequence[str]) -> None:
        self._units = tuple(units)
        self._snapshots: dict[int, _Snapshot] = {}

    # ---- what is known

    def __contains__(self, step: int) -> bool:
        return step in self._snapshots

    @property
    def complete(self) -> tuple[int, ...]:
        """Steps of complete snapshots, oldest first."""
        return tuple(sorted(step for step, state in self._snapshots.items() if state.complete))

    def entry(self, step: int, unit: str) -> UnitEntry | None:
        """The description of the unit's file; None until a node has reported it."""
        return self._snapshots[step].layers[unit].entry

    def entries(self, step: int) -> tuple[UnitEntry, ...]:
        """The files of all units, in model order. Call it only on complete snapshots."""
        entries = (self.entry(step, unit) for unit in self._units)
        return tuple(entry for entry in entries if entry is not None)

    def url(self, step: int) -> str:
        """The object store's folder of a snapshot; empty if nodes hold it."""
        return self._snapshots[step].url

    def holders(self, step: int, unit: str) -> tuple[str, ...]:
        """The nodes that hold the unit's file, connected or not."""
        return tuple(sorted(self._snapshots[step].layers[unit].holders))

    def missing(self, step: int, present: Collection[str]) -> tuple[str, ...]:
        """The units of a snapshot that no present node holds."""
        if self.url(step):
            return ()
        layers = self._snapshots[step].layers
        return tuple(unit for unit in self._units if layers[unit].holders.isdisjoint(present))

    def gone(self, step: int, present: Collection[str]) -> tuple[str, ...]:
        """The units of an incomplete snapshot that some node has saved, and that no present node has."""
        if self.url(step):
            return ()
        return tuple(
            unit
            for unit, layer in self._snapshots[step].layers.items()
            if (nodes := layer.holders | layer.reported.keys()) and nodes.isdisjoint(present)
        )

    def is_whole(self, step: int, present: Collection[str], now: float) -> bool:
        """Whether every layer is on enough machines."""
        return all(
            layer.entry is not None
            and layer.entry.weights_sha256
            and (self.url(step) or layer.is_safe(present, now))
            for layer in self._snapshots[step].layers.values()
        )

    @property
    def under_way(self) -> tuple[int, ...]:
        """The steps of incomplete snapshots, oldest first."""
        return tuple(sorted(step for step, state in self._snapshots.items() if not state.complete))

    # ---- what happens

    def load(
        self,
        step: int,
        entries: Collection[UnitEntry],
        holders: Mapping[str, Collection[str]],
        url: str = "",
    ) -> None:
        """Add a complete snapshot of an earlier coordinator. `holders`: by unit, as far as known."""
        layers = {
            entry.unit: _Layer(entry=entry, holders=set(holders.get(entry.unit, ()))) for entry in entries
        }
        self._snapshots[step] = _Snapshot(layers, complete=True, url=url)

    def expect(self, step: int, makers: Mapping[str, Collection[str]], now: float, url: str = "") -> None:
        """Nodes will save the state of `step`. An earlier attempt is dropped.

        Args:
            makers: by unit, the nodes that have its state. The first one saves it.
            url: the object store's folder in which they save it; on their own disks by default.
        """
        layers = {
            unit: _Layer(tuple(makers[unit]), asked=dict.fromkeys(makers[unit], now)) for unit in self._units
        }
        self._snapshots[step] = _Snapshot(layers, url=url)
        for other in [old for old in self.under_way if old != step][: 1 - MOST_UNDER_WAY]:
            del self._snapshots[other]

    def held(self, node_id: str, file: HeldLayer) -> bool:
        """A node has this file on its disk. Returns whether it belongs to a snapshot."""
        snapshot = self._snapshots.get(file.step)
        if snapshot is None or file.unit not in snapshot.layers:
            return False
        layer = snapshot.layers[file.unit]
        if layer.entry is None:
            if node_id not in layer.makers:
                return False
            if not layer.agreed:
                layer.reported[node_id] = _described(file, layer.reported.get(node_id))
                return True
            if file.sha256 != layer.agreed:
                return False
        entry = layer.entry
        if entry is not None and entry.sha256 != file.sha256:
            layer.forget(node_id)
            return False
        if not snapshot.complete:
            layer.note(node_id, file)
        elif entry is not None and entry.bytes == file.bytes:
            layer.holders.add(node_id)
        if node_id not in layer.holders:
            return node_id in layer.makers and not snapshot.complete
        layer.asked.pop(node_id, None)
        layer.refused.pop(node_id, None)
        layer.late.discard(node_id)
        return True

    def agreed(self, step: int, hashes: Mapping[str, str]) -> list[tuple[str, str]]:
        """Set the agreed files of a snapshot's units. Returns the nodes, and their units, that saved other
        files."""
        snapshot = self._snapshots.get(step)
        wrong: list[tuple[str, str]] = []
        for unit, sha256 in hashes.items():
            if snapshot is None:
                break
            layer = snapshot.layers[unit]
            layer.agreed = sha256
            reported, layer.reported = layer.reported, {}
            wrong += [(node, unit) for node, file in reported.items() if not self.held(node, file)]
        return wrong

    def others(self, node_id: str, step: int) -> dict[str, tuple[str, ...]]:
        """A node saves no more in an object store. Returns the nodes to ask instead, for missing units."""
        snapshot = self._snapshots.get(step)
        asked: dict[str, tuple[str, ...]] = {}
        if snapshot is None or not snapshot.url:
            return asked
        for unit, layer in snapshot.layers.items():
            if layer.entry is None and layer.makers[:1] == (node_id,):
                layer.makers = layer.makers[1:]
                for other in layer.makers[:1]:
                    asked[other] = (*asked.get(other, ()), unit)
        return asked

    def is_wrong(self, node_id: str, file: HeldLayer) -> bool:
        """Whether this node, one of the layer's makers, saved a file that differs from the agreed one."""
        snapshot = self._snapshots.get(file.step)
        layer = snapshot.layers.get(file.unit) if snapshot is not None and not snapshot.complete else None
        return (
            layer is not None
            and node_id in layer.makers
            and bool(layer.agreed)
            and file.sha256 != layer.agreed
        )

    def lost(self, node_id: str, step: int, unit: str, now: float) -> None:
        """The node's copy is damaged or missing, or does not fit on its disk: ask others for a while."""
        snapshot = self._snapshots.get(step)
        if snapshot is not None and (layer := snapshot.layers.get(unit)) is not None:
            layer.forget(node_id)
            layer.asked.pop(node_id, None)
            layer.refused[node_id] = now

    def doubted(self, node_id: str, step: int, unit: str, *, by: str) -> bool:
        """The node `by` got no good copy from this one, which checks its own. Returns whether it held one.

        A copy of a complete snapshot counts on until its holder says that it is bad: whoever doubts it must
        not keep it from others. Before that a node is heeded once for each copy: whoever keeps doubting must
        not keep the snapshot from completing.
        """
        snapshot = self._snapshots.get(step)
        if snapshot is None or node_id not in (layer := snapshot.layers[unit]).holders:
            return False
        if not snapshot.complete and (by, node_id) not in layer.doubts:
            layer.doubts.add((by, node_id))
            layer.forget(node_id)
        return True

    def completed(self, step: int) -> None:
        """The manifest of `step` is on disk. Older incomplete snapshots are no longer needed."""
        self._snapshots[step].complete = True
        for other in [old for old, state in self._snapshots.items() if old < step and not state.complete]:
            del self._snapshots[other]

    def drop(self, step: int) -> None:
        """The snapshot is no longer used."""
        self._snapshots.pop(step, None)

    def asks(self, present: Sequence[str], now: float) -> list[Ask]:
        """Requests for copies of all incomplete snapshots and of the newest complete one.

        Args:
            present: connected nodes, hosts first, in the order of their stages.
        """
        newest = self.complete[-1:]
        wanted: dict[tuple[int, str], list[str]] = {}
        for step, snapshot in self._snapshots.items():
            if snapshot.url or (snapshot.complete and step not in newest):
                continue
            load = self._load(snapshot, present)
            for unit, layer in snapshot.layers.items():
                node_id = layer.next_holder(present, load, now)
                if node_id is None:
                    continue
                assert layer.entry is not None
                if node_id in layer.asked:
                    layer.late.add(node_id)
                layer.asked[node_id] = now
                load[node_id] += layer.entry.bytes
                wanted.setdefault((step, node_id), []).append(unit)
        return [Ask(node_id=node, step=step, units=tuple(units)) for (step, node), units in wanted.items()]

    # ---- inside

    def _load(self, snapshot: _Snapshot, present: Sequence[str]) -> dict[str, int]:
        """The bytes of the snapshot that each node holds, makes or was asked for."""
        load = dict.fromkeys(present, 0)
        for layer in snapshot.layers.values():
            size = layer.entry.bytes if layer.entry is not None else 0
            for node_id in {*layer.makers, *layer.holders, *layer.asked} & load.keys():
                load[node_id] += size
        return load


def _described(file: HeldLayer, before: HeldLayer | None) -> HeldLayer:
    """A node's report, with the hash of the weights from its report before if it lacks that. A node that has
    started again names the files on its disk without reading them for it."""
    if before is None or file.weights_sha256 or before.sha256 != file.sha256:
        return file
    return replace(file, weights_sha256=before.weights_sha256)
