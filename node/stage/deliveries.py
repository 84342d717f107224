"""Finds out when what a node has computed of a step's groups has arrived at other rows."""

import threading
from collections.abc import Callable, Collection, Mapping

from wire.link import Link

Sent = tuple[int, int, Link]
"""A piece, a node of the tree of groups, and the link on which they were sent."""


class Deliveries:
    """What has arrived of the tensors of one step. Links call `arrived` on their threads."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        """`tell` is called with the generation and a node of the tree, once that has arrived in all pieces,
        and again if it has to go elsewhere."""
        self._tell = tell
        self._lock = threading.Lock()
        self._generation = 0
        self._arrived: set[Sent] = set()
        self._missing: dict[int, set[Sent]] = {}
        """By node of the tree: what has not arrived yet."""
        self._told: set[int] = set()

    def expect(self, generation: int, needed: Mapping[int, Collection[Sent]], *, anew: bool) -> None:
        """Wait for these tensors, by node of the tree. `anew`: tell also what was told before."""
        with self._lock:
            self._generation = generation
            if anew:
                self._told.clear()
            self._missing = {
                node: set(sent).difference(self._arrived)
                for node, sent in needed.items()
                if node not in self._told
            }
            there = [node for node, missing in self._missing.items() if not missing]
            self._note(there)
        for node in there:
            self._tell(generation, node)

    def arrived(self, sent: Sent) -> None:
        node = sent[1]
        with self._lock:
            self._arrived.add(sent)
            missing = self._missing.get(node)
            if missing is None:
                return
            missing.discard(sent)
            if missing:
                return
            self._note([node])
            generation = self._generation
        self._tell(generation, node)

    def _note(self, nodes: Collection[int]) -> None:
        self._told.update(nodes)
        for node in nodes:
            del self._missing[node]
