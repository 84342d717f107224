"""Digests of what a stage computes for each gradient group. Rows use them to check each other.

Packed tensors are hashed during compute: boundary tensors when they are packed and unpacked, and a group's
gradient on the sync thread. SHA-256 reads about a gigabyte per second on one core.
"""

import hashlib
import threading
from collections.abc import Collection, Mapping

from torch import Tensor

from node.config.schema import RunConfig
from node.schedule.gradient_groups import Piece, group_of
from node.schedule.placement import slices_of
from wire.messages import DIGEST_BYTES, BoundaryEnd, GroupDigests
from wire.spec import Direction, TensorKey

_BOUNDARIES = (Direction.ACTIVATION, Direction.GRADIENT)


class StepDigests:
    """The digests of one step of one stage. Call `note` and `note_piece` from any thread."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._slices = slices_of(config)
        self._lock = threading.Lock()
        self._tensors: dict[tuple[int, BoundaryEnd], dict[int, bytes]] = {}
        """The SHA-256 of each microbatch's or slice's tensor, by group and end."""
        self._pieces: dict[int, dict[int, bytes]] = {}
        """The SHA-256 of each piece of a group's gradient, by group."""

    def note(self, key: TensorKey, packed: Tensor, *, received: bool) -> None:
        """Record a packed tensor, uint8 [n] on the CPU, that was sent or received over a boundary."""
        microbatch = key.microbatch // self._slices
        if key.direction not in _BOUNDARIES or microbatch >= self._config.microbatches:
            return
        end = BoundaryEnd(key.boundary, key.direction is Direction.GRADIENT, received)
        digest = _sha256(packed)
        with self._lock:
            of_group = self._tensors.setdefault((group_of(self._config, microbatch), end), {})
            of_group[key.microbatch] = digest

    def note_piece(self, group: int, piece: Piece, packed: Tensor) -> None:
        """Record a packed piece of a group's gradient."""
        digest = _sha256(packed)
        with self._lock:
            self._pieces.setdefault(group, {})[piece.number] = digest

    def of(
        self, groups: Collection[int], losses: Mapping[int, float], audited: Collection[int]
    ) -> dict[int, GroupDigests]:
        """The digests of `groups` and `audited`, once everything is computed. `losses`: by group, on the
        stage with the head."""
        by_group = {}
        for group, pieces in sorted(self._pieces.items()):
            if group not in groups and group not in audited:
                continue
            ends = {end: _joined(digests) for (of, end), digests in self._tensors.items() if of == group}
            loss = losses.get(group) if group in audited else None
            by_group[group] = GroupDigests(gradient=_joined(pieces), boundaries=ends, loss=loss)
        return by_group


def _sha256(packed: Tensor) -> bytes:
    return hashlib.sha256(memoryview(packed.numpy().data)).digest()


def _joined(digests: Mapping[int, bytes]) -> bytes:
    """One digest of several, joined in the order of their numbers."""
    return hashlib.sha256(b"".join(digests[number] for number in sorted(digests))).digest()[:DIGEST_BYTES]
