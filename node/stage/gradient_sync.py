"""Sums a stage's gradient groups, its own row's and those of other rows, beside its compute.

A thread of its own packs each group's gradient as soon as the group's last backward is over, adds up nodes of
the tree, sends the row's subtrees to the pieces' owners, adds up the pieces that this row owns, and sends
these sums back. What is left when the stage has no more to compute is time of kind `sync`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from node.config.schema import RunConfig
from node.schedule.gradient_groups import ROOT, Fold, Piece, RowShare, model_pieces, owners, piece_bytes
from node.stage.device_transfer import CudaTransfer
from node.stage.digests import StepDigests
from node.stage.inbox import StepInterrupted
from node.stage.tensor_transfer import BadTensorError
from node.training.group_sums import CodecPacking, Gradient, Packing, PieceSums
from wire.codecs.base import Codec
from wire.errors import NonFiniteError, PackedMismatchError
from wire.spec import Direction, TensorKey, TensorSpec

KeepSums = Callable[[int, str, Sequence[Tensor]], None]
"""(step, unit, the packed sum over all groups of each of its pieces, uint8 on the CPU)."""


class SyncIO(Protocol):
    """Sends packed pieces to the same stage in other rows, and receives them. Call it from any thread."""

    def take(self, key: TensorKey) -> Tensor:
        """Wait for the packed tensor under `key`. Raises StepInterrupted."""
        ...

    def send_to_row(self, row: int, key: TensorKey, packed: Tensor, elements: int) -> None:
        """Queue a packed tensor without waiting for the network."""
        ...

    def interrupt(self, error: Exception) -> None:
        """End the current or next wait."""
        ...


class DevicePacking:
    """`node.training.group_sums.RowPacking` for a GPU, on streams beside the stage's compute."""

    def __init__(self, device: CudaTransfer) -> None:
        self._device = device

    def pack(self, which: Codec, tensor: Tensor) -> Tensor:
        return self._device.pack(which, tensor, self._device.mark())

    def unpack(self, which: Codec, packed: Tensor, spec: TensorSpec) -> Tensor:
        tensor, mark = self._device.unpack(which, packed, spec)
        self._device.wait(tensor, mark)
        return tensor

    def pack_rows(self, which: Codec, values: Tensor) -> list[Tensor]:
        return self._device.pack_rows(which, values, self._device.mark())

    def unpack_rows(self, which: Codec, packed: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        values, mark = self._device.unpack_rows(which, packed, spec)
        self._device.wait(values, mark)
        return values


def _piece_sums(packing: Packing, *, uncompressed: bool = False) -> PieceSums:
    rows = packing if isinstance(packing, DevicePacking) else None
    return PieceSums(packing, rows=rows, uncompressed=uncompressed)


def _packing(device: torch.device) -> Packing:
    return DevicePacking(CudaTransfer(device)) if device.type == "cuda" else CodecPacking(device)


class SyncPlan:
    """What a stage sends and receives between rows in a step."""

    def __init__(
        self,
        config: RunConfig,
        units: Sequence[str],
        share: RowShare,
        *,
        uncompressed: bool,
        of_round: bool = False,
    ) -> None:
        """
        Args:
            units: of the stage, in the order in which backward completes them.
            of_round: the pieces are those of a round.
        """
        pieces = model_pieces(config, of_round=of_round)
        self.uncompressed = uncompressed
        self.share = share
        self.units = tuple(units)
        self.pieces = {unit: pieces[unit] for unit in units}
        self.sizes = {
            piece.number: piece_bytes(piece, uncompressed=uncompressed)
            for unit in units
            for piece in pieces[unit]
        }
        self.owners = owners(self.sizes, share.subtree_counts)

    def unit_bytes(self, unit: str) -> int:
        """Bytes of a unit's packed sum."""
        return sum(self.sizes[piece.number] for piece in self.pieces[unit])

    def is_own(self, piece: Piece) -> bool:
        """Whether this row sums up the piece."""
        return self.owners[piece.number] == self.share.replica

    def source_row(self, key: TensorKey) -> int | None:
        """The row that may send this stage such a tensor; None if none may."""
        owner = self.owners.get(key.boundary)
        if owner is None:
            return None
        if key.direction is Direction.SYNC_SUM:
            row = owner if key.microbatch == ROOT else None
        else:
            row = self.share.row_with(key.microbatch) if owner == self.share.replica else None
        return None if row == self.share.replica else row


class GradientSync:
    """The sync thread of one stage. Call all methods on the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self._packing, self._joining = _packing(device), _packing(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._jobs: list[Future[None]] = []
        self._plan: SyncPlan
        self._sums: PieceSums
        self._joined: PieceSums
        """On the compute thread."""
        self._io: SyncIO
        self._keep: KeepSums | None = None
        self._place = 0, 0
        self._folds: dict[int, Fold[Tensor]] = {}
        self._roots: dict[str, Future[None]] = {}
        self._digests: StepDigests | None = None

    def begin(
        self,
        plan: SyncPlan,
        epoch: int,
        step: int,
        io: SyncIO,
        *,
        keep: KeepSums | None = None,
        digests: StepDigests | None = None,
    ) -> None:
        """A step begins; nothing of an earlier one is left.

        `keep` gets what `finish` unpacks; `digests` notes groups' packed gradients.
        """
        self._plan, self._io, self._keep, self._digests = plan, io, keep, digests
        self._place = epoch, step
        self._sums = _piece_sums(self._packing, uncompressed=plan.uncompressed)
        self._joined = _piece_sums(self._joining, uncompressed=plan.uncompressed)
        self._folds = {
            piece.number: self._sums.fold(piece) for unit in plan.units for piece in plan.pieces[unit]
        }
        self._roots = {}

    def group_done(self, group: int, gradients: Mapping[str, Mapping[str, Gradient]]) -> None:
        """Take a group's complete gradients of some layer units; of another row's group only for digests.

        Waits until those taken before are packed, so that there is one copy at most; raises their error.
        """
        while self._jobs:
            self._jobs.pop(0).result()
        plan = self._plan

        def work() -> None:
            for unit in plan.units:
                if unit in gradients and self._sums.together:
                    self._take_leaves(plan.pieces[unit], group, gradients[unit])
                elif unit in gradients:
                    for piece in plan.pieces[unit]:
                        self._take_leaf(piece, group, gradients[unit])

        self._submit(work)

    def finish(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """All groups of the row are done: layer units and the sum of all groups, flat by parameter.

        Raises NonFiniteError, BadTensorError, or StepInterrupted.
        """
        plan = self._plan
        for unit in plan.units:
            self._roots[unit] = self._submit(partial(self._sum_up, unit))
        for unit in plan.units:
            self._roots[unit].result()
            pieces = plan.pieces[unit]
            roots = [self._root(piece) for piece in pieces]
            if self._keep is not None and roots:
                self._keep(self._place[1], unit, roots)
            yield unit, self._joined.join(pieces, roots)
        self.drain()

    def read(self, plan: SyncPlan, sums: Mapping[str, bytes]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """What `finish` gave on the node that kept these packed sums, by unit. Raises PackedMismatchError or
        NonFiniteError for bytes that no node keeps."""
        joining = _piece_sums(self._joining)
        for unit in plan.units:
            pieces = plan.pieces[unit]
            if len(sums[unit]) != plan.unit_bytes(unit):
                raise PackedMismatchError(f"{len(sums[unit])} bytes, expected {plan.unit_bytes(unit)}")
            if not pieces:  # all of it is frozen
                yield unit, {}
                continue
            packed = torch.frombuffer(bytearray(sums[unit]), dtype=torch.uint8)
            parts = torch.split(packed, [plan.sizes[piece.number] for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                joining.check(piece, part)
            yield unit, joining.join(pieces, parts)

    def drain(self) -> None:
        """Wait for all jobs. Raises the first error that is not an interruption."""
        for job in self._jobs:
            error = job.exception()
            if error is not None and not isinstance(error, StepInterrupted):
                raise error
        self._jobs.clear()

    def settle(self) -> None:
        """Wait for all jobs; drop their results and errors, and what they hold."""
        for job in self._jobs:
            job.exception()
        self._jobs.clear()
        self._folds.clear()
        self._roots.clear()

    # ---- on the sync thread

    def _take_leaf(self, piece: Piece, group: int, gradients: Mapping[str, Gradient]) -> None:
        plan, fold = self._plan, self._folds[piece.number]
        packed = self._sums.leaf(piece, gradients)
        if self._digests is not None:
            self._digests.note_piece(group, piece, packed)
        if group not in plan.share.groups:
            return
        fold.put(plan.share.tree.leaf(group), packed)
        self._send_subtrees(piece)

    def _take_leaves(self, pieces: Sequence[Piece], group: int, gradients: Mapping[str, Gradient]) -> None:
        """`_take_leaf` of a unit's pieces, together."""
        plan = self._plan
        packed = dict(zip(pieces, self._sums.leaves(pieces, gradients), strict=True))
        if self._digests is not None:
            for piece, leaf in packed.items():
                self._digests.note_piece(group, piece, leaf)
        if group not in plan.share.groups:
            return
        self._sums.put(self._folds, plan.share.tree.leaf(group), packed)
        for piece in pieces:
            self._send_subtrees(piece)

    def _send_subtrees(self, piece: Piece) -> None:
        """Send what is whole of a piece to its owner, if another row owns it."""
        plan, fold = self._plan, self._folds[piece.number]
        if plan.is_own(piece):
            return
        for node in plan.share.subtrees[plan.share.replica]:
            if (whole := fold.nodes.pop(node, None)) is not None:
                key = self._key(piece, node, Direction.SYNC_SHARE)
                self._io.send_to_row(plan.owners[piece.number], key, whole, piece.elements)

    def _sum_up(self, unit: str) -> None:
        """Add other rows' subtrees to the pieces that this row owns, and send the sums."""
        plan, share = self._plan, self._plan.share
        own = [piece for piece in plan.pieces[unit] if plan.is_own(piece)]
        others = [node for row in range(share.rows) if row != share.replica for node in share.subtrees[row]]
        if self._sums.together:
            for node in others:
                taken = {piece: self._take(piece, node, Direction.SYNC_SHARE) for piece in own}
                self._sums.put(self._folds, node, taken)
        for piece in own:
            if not self._sums.together:
                for node in others:
                    self._folds[piece.number].put(node, self._take(piece, node, Direction.SYNC_SHARE))
            for row in range(share.rows):
                if row != share.replica:
                    root = self._folds[piece.number].nodes[ROOT]
                    self._io.send_to_row(
                        row, self._key(piece, ROOT, Direction.SYNC_SUM), root, piece.elements
                    )

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        def job() -> None:
            try:
                work()
            except StepInterrupted:
                raise
            except Exception as error:
                # The compute thread may wait for a neighbour meanwhile.
                self._io.interrupt(error)
                raise

        future = self._thread.submit(job)
        self._jobs.append(future)
        return future

    # ---- on either thread

    def _root(self, piece: Piece) -> Tensor:
        if self._plan.is_own(piece):
            return self._folds[piece.number].nodes.pop(ROOT)
        return self._take(piece, ROOT, Direction.SYNC_SUM)

    def _take(self, piece: Piece, node: int, direction: Direction) -> Tensor:
        """A packed piece from another row. Raises BadTensorError if no encoder makes it."""
        key = self._key(piece, node, direction)
        packed = self._io.take(key)
        try:
            self._sums.check(piece, packed)
        except (PackedMismatchError, NonFiniteError) as error:
            raise BadTensorError(key, error) from error
        return packed

    def _key(self, piece: Piece, node: int, direction: Direction) -> TensorKey:
        epoch, step = self._place
        return TensorKey(epoch, step, node, piece.number, direction)
