"""Sums the gradient groups of a stage's own row and of other rows during compute.

A separate thread packs each group's gradient when the group's last backward is done. It adds up nodes of the
tree, sends the row's subtrees to the pieces' owners, sums the pieces that this row owns, and sends these sums
back. Work that remains when the stage has nothing more to compute counts as time of kind `sync`.

A row keeps what it sent, packed, until the commit, because an owner may die, and another row then sums its
pieces.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from node.config.schema import RunConfig
from node.schedule.gradient_groups import (
    ROOT,
    Fold,
    Piece,
    RowShare,
    StepWork,
    model_pieces,
    owners,
    piece_bytes,
)
from node.stage.deliveries import Deliveries, Sent
from node.stage.device_transfer import CudaTransfer
from node.stage.digests import StepDigests
from node.stage.inbox import LinksIO, StepInterrupted
from node.stage.sums_kept import KeepSums
from node.stage.tensor_transfer import BadTensorError
from node.training.group_sums import CodecPacking, Gradient, Packing, PieceSums
from wire.codecs.base import Codec
from wire.errors import NonFiniteError, PackedMismatchError
from wire.link import Link
from wire.messages import DIGEST_BYTES
from wire.spec import Direction, TensorKey, TensorSpec

Arrived = Callable[[int, Sequence[int]], None]
"""Takes (generation, groups that have arrived where others can sum them up)."""


class DevicePacking:
    """Implements `node.training.group_sums.Packing` for a GPU, on streams that run during compute."""

    together = True

    def __init__(self, device: CudaTransfer) -> None:
        self._device = device

    def pack_rows(self, which: Codec, values: Tensor) -> list[Tensor]:
        return self._device.pack_rows(which, values, self._device.mark())

    def unpack_rows(self, which: Codec, packed: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        values, mark = self._device.unpack_rows(which, packed, spec)
        self._device.wait(values, mark)
        return values


def digest_of_sum(parts: Iterable[bytes | memoryview]) -> bytes:
    """The digest of a unit's packed sum, which may come in parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()[:DIGEST_BYTES]


def _arrived(deliveries: Iterable[Deliveries], sent: Sent) -> None:
    for expecting in deliveries:
        expecting.arrived(sent)


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
            units: the stage's units, in the order in which backward completes them.
            of_round: whether the pieces are those of a round.
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
        """For each piece, the row that sums it if every row has a node of this stage."""

    def unit_bytes(self, unit: str) -> int:
        """The bytes of a unit's packed sum."""
        return sum(self.sizes[piece.number] for piece in self.pieces[unit])

    def bytes_between_rows(self, key: TensorKey) -> int | None:
        """The packed size of a tensor that another row may send to this stage; None if no row may.

        It may be any node of the tree, whoever owns the piece: rows learn of changes at different times. What
        no known work asks for waits (`node.stage.early_tensors`).
        """
        is_sum, node = key.direction is Direction.SYNC_SUM, key.microbatch
        return (
            self.sizes.get(key.boundary) if node == ROOT or (not is_sum and node in self.share.tree) else None
        )

    def comes(self, row: int, key: TensorKey, work: StepWork) -> bool:
        """Whether another row sends this tensor to the own one with this work, perhaps to hand it over, or to
        pass on what a row without a node had handed over to it."""
        piece, own = key.boundary, self.share.replica
        first, absent = self.owners[piece], work.seats[0]
        owner, source = work.owner(first, piece), work.sources.get(key.microbatch)
        if key.direction is Direction.SYNC_SUM:
            return owner == row
        is_heir = own == work.heir(row, first, piece)
        if source == row:
            return is_heir or own == owner
        # The row that passed it on may have lost its node since.
        return is_heir and source in absent and (row == owner or row in absent)


class GradientSync:
    """The sync thread of one stage. Call all methods on the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self._packing, self._joining = _packing(device), _packing(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._jobs: list[Future[None]] = []
        self._plan: SyncPlan
        self._sums: PieceSums
        self._joined: PieceSums
        """The sums of pieces; used on the compute thread."""
        self._io: LinksIO
        self._keep: KeepSums | None = None
        self._place = 0, 0
        self._work: StepWork
        self._batches: dict[str, list[list[Piece]]] = {}
        """The pieces of each unit in batches that go through their codec together."""
        self._folds: dict[int, Fold[list[Tensor]]] = {}
        """Running sums of the own row's groups, by the first piece of a batch."""
        self._held: dict[int, dict[int, Tensor]] = {}
        """For each piece, complete subtrees of the own row, and those that other rows sent to be summed."""
        self._spare: dict[int, dict[int, list[Tensor]]] = {}
        """Leaves of groups that other rows will compute, by the first piece of a batch."""
        self._sums_of: dict[int, Tensor] = {}
        """For each piece, the sum over all groups. They are kept for a row that computes more groups in this
        step."""
        self._sent: set[tuple[int, int, Direction, Link]] = set()
        """The piece, node of the tree, direction and link of every tensor that was sent."""
        self._roots: dict[str, Future[None]] = {}
        self._joined_units: set[str] = set()
        self._kept_units: set[str] = set()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._sum_digests: dict[str, Future[bytes]] = {}
        self._digests: StepDigests | None = None
        self._deliveries: tuple[Deliveries, Deliveries]
        """Of what the row has computed and hands over, and of what rows without a node had handed over to it,
        which it passes on."""
        self._hands_over = False

    def begin(
        self,
        plan: SyncPlan,
        epoch: int,
        step: int,
        io: LinksIO,
        *,
        work: StepWork,
        keep: KeepSums | None = None,
        digests: StepDigests | None = None,
        told: tuple[Arrived, Arrived],
        hands_over: bool = False,
        generation: int = 0,
    ) -> None:
        """Begin a step; nothing of an earlier step remains.

        Args:
            keep: receives the sums that `finish` unpacks.
            digests: records groups' packed gradients.
            told: called on any thread when groups of the own row, or of rows without a node, have arrived.
            hands_over: whether they are. The own row's part of pieces that it owns is then also sent to
                another row, and so are those of rows without a node.
            generation: of `work`.
        """
        self._forget()
        self._plan, self._io, self._keep, self._digests = plan, io, keep, digests
        self._place, self._work = (epoch, step), work
        self._sums = PieceSums(self._packing, uncompressed=plan.uncompressed)
        self._joined = PieceSums(self._joining, uncompressed=plan.uncompressed)
        self._batches = {unit: list(self._sums.batches(plan.pieces[unit])) for unit in plan.units}
        batches = [batch for unit in plan.units for batch in self._batches[unit]]
        self._folds = {batch[0].number: self._sums.fold(batch) for batch in batches}
        self._held = {number: {} for number in plan.sizes}
        self._spare = {number: {} for number in self._folds}
        span, (computed, passed_on) = plan.share.tree.span, told
        self._deliveries = (
            Deliveries(lambda generation, node: computed(generation, span(node))),
            Deliveries(lambda generation, node: passed_on(generation, span(node))),
        )
        self._hands_over = hands_over
        if hands_over:
            self._expect(generation, anew=True)
            self._submit(self._pass_on)

    def use(
        self, work: StepWork, generation: int, *, keep: KeepSums | None = None, hands_over: bool = False
    ) -> None:
        """Change which rows compute the step's groups. What `finish` has returned stays valid unless `again`
        follows.

        `keep`, `hands_over`: as for `begin`, from now on. Sums that `finish` has returned are kept too, once
        it is called again.
        """
        self.drain()
        self._keep = keep

        def change() -> None:
            is_other = work.seats != self._work.seats or not self._hands_over
            self._work, self._hands_over = work, hands_over
            self._expect(generation, anew=is_other)
            for unit in self._plan.units:
                for batch in self._batches[unit]:
                    number = batch[0].number
                    for group in work.groups:
                        if (leaves := self._spare[number].pop(group, None)) is not None:
                            self._folds[number].put(self._plan.share.tree.leaf(group), leaves)
                    self._send_subtrees(batch)
            self._pass_on()

        self._submit(change)

    def again(self) -> None:
        """The gradients that `finish` returned are lost: return them again."""
        self._joined_units.clear()

    def group_done(self, group: int, gradients: Mapping[str, Mapping[str, Gradient]]) -> None:
        """Take a group's complete gradients of some layer units; of another row's group only for digests.

        Waits until earlier gradients are packed, so that there is at most one copy. Raises their error.
        """
        while self._jobs:
            self._jobs.pop(0).result()
        plan = self._plan

        def work() -> None:
            for unit in plan.units:
                for batch in self._batches[unit] if unit in gradients else ():
                    self._take_leaves(batch, group, gradients[unit])

        self._submit(work)

    def finish(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """All groups of the row are done: yield layer units and the sum of all groups, flat by parameter.

        Raises NonFiniteError, BadTensorError, or StepInterrupted.
        """
        plan = self._plan
        for unit in plan.units:
            self._roots[unit] = self._submit(partial(self._sum_up, unit))
        for unit in plan.units:
            self._roots[unit].result()
            keep = self._keep if unit not in self._kept_units else None
            if unit in self._joined_units and keep is None:
                continue
            pieces = plan.pieces[unit]
            roots = [self._root(piece) for piece in pieces]
            if roots and plan.share.rows > 1 and unit not in self._sum_digests:
                # A gigabyte takes a second. Meanwhile the sums are unpacked.
                self._sum_digests[unit] = self._hashing.submit(
                    digest_of_sum, [part.numpy().data for part in roots]
                )
            if keep is not None and roots:
                keep(self._place[1], unit, roots)
                self._kept_units.add(unit)
            if unit not in self._joined_units:
                yield unit, self._joined.join(pieces, roots)
                self._joined_units.add(unit)
        self.drain()

    def digests_of_sums(self) -> dict[str, bytes]:
        """After `finish`, with several rows: the digest of each unit's packed sum over all groups."""
        return {unit: digest.result() for unit, digest in self._sum_digests.items()}

    def read(self, plan: SyncPlan, sums: Mapping[str, bytes]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The result of `finish` on the node that kept these packed sums, by unit. Raises PackedMismatchError
        or NonFiniteError for invalid bytes."""
        joining = PieceSums(self._joining)
        for unit in plan.units:
            pieces = plan.pieces[unit]
            if len(sums[unit]) != plan.unit_bytes(unit):
                raise PackedMismatchError(f"{len(sums[unit])} bytes, expected {plan.unit_bytes(unit)}")
            if not pieces:  # the unit is frozen
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

    def settle(self, *, forget: bool) -> None:
        """Wait for all jobs. Drop their results and errors and, with `forget`, the tensors that they hold."""
        self._wait()
        if forget:
            self._forget()

    def _wait(self) -> None:
        for job in self._jobs:
            job.exception()
        self._jobs.clear()

    def _forget(self) -> None:
        for held in (self._folds, self._held, self._spare, self._sums_of, self._roots, self._sum_digests):
            held.clear()
        for names in (self._sent, self._joined_units, self._kept_units):
            names.clear()

    # ---- on the sync thread

    def _take_leaves(self, batch: Sequence[Piece], group: int, gradients: Mapping[str, Gradient]) -> None:
        leaves, number = self._sums.leaves(batch, gradients), batch[0].number
        if self._digests is not None:
            for piece, leaf in zip(batch, leaves, strict=True):
                self._digests.note_piece(group, piece, leaf)
        if group not in self._work.groups:
            self._spare[number][group] = leaves
            return
        self._folds[number].put(self._plan.share.tree.leaf(group), leaves)
        self._send_subtrees(batch)

    def _send_subtrees(self, batch: Sequence[Piece]) -> None:
        """Keep the row's complete subtrees, and send them to the rows that sum the pieces."""
        nodes, own = self._folds[batch[0].number].nodes, self._plan.share.replica
        for node in self._work.own:
            if (whole := nodes.pop(node, None)) is not None:
                for piece, part in zip(batch, whole, strict=True):
                    self._held[piece.number][node] = part
        for piece in batch:
            held, receiver = self._held[piece.number], self._receiver(piece)
            for node in self._work.own if receiver != own else ():
                if node in held:
                    self._send(receiver, piece, node, Direction.SYNC_SHARE, held[node])

    def _receiver(self, piece: Piece) -> int:
        """The row that gets the own row's subtrees of a piece."""
        if not self._hands_over:
            return self._owner(piece)
        return self._work.heir(self._plan.share.replica, self._plan.owners[piece.number], piece.number)

    def _expect(self, generation: int, *, anew: bool) -> None:
        """Look out for the arrival of the own row's subtrees at their present receivers."""
        if not self._hands_over:
            return
        computed, passed_on = self._deliveries
        pieces = [piece for unit in self._plan.units for piece in self._plan.pieces[unit]]
        rows = {piece.number: self._receiver(piece) for piece in pieces}
        own = self._work.own if rows else ()  # without pieces, nothing shows that a group is computed
        computed.expect(generation, self._arrivals(own, rows), anew=anew)
        heirs = {piece.number: rows[piece.number] for piece in pieces if self._is_own(piece)}
        passed_on.expect(generation, self._arrivals(self._orphans, heirs), anew=anew)

    def _arrivals(self, nodes: Iterable[int], rows: Mapping[int, int]) -> dict[int, list[Sent]]:
        """What is to arrive of these nodes of the tree. `rows`: where each piece goes."""
        if self._plan.share.replica in rows.values():
            return {}  # there is nobody else
        links = {row: self._io.link_to_row(row) for row in {*rows.values()}}
        return {node: [(number, node, links[row]) for number, row in rows.items()] for node in nodes}

    @property
    def _orphans(self) -> list[int]:
        """The nodes of the tree that rows without a node of this stage have handed over."""
        return [node for node, row in self._work.sources.items() if row in self._work.seats[0]]

    def _pass_on(self) -> None:
        """Send what rows without a node have handed over to the rows that sum it up if this one loses its
        node, too."""
        own, orphans = self._plan.share.replica, self._orphans
        pieces = [piece for unit in self._plan.units for piece in self._plan.pieces[unit]]
        for piece in pieces if self._hands_over and orphans else ():
            if not self._is_own(piece) or (heir := self._receiver(piece)) == own:
                continue
            held = self._held[piece.number]
            for node in orphans:
                row, key = self._work.sources[node], self._key(piece, node, Direction.SYNC_SHARE)
                # Nothing waits here: the compute thread may wait for this one as newer work comes.
                if node not in held and (packed := self._io.take_of_gone(row, key)) is not None:
                    try:
                        self._sums.check(piece, packed)
                    except (PackedMismatchError, NonFiniteError):
                        self._io.missed(row)
                        continue
                    held[node] = packed
                if node in held:
                    self._send(heir, piece, node, Direction.SYNC_SHARE, held[node])

    def _send(self, row: int, piece: Piece, node: int, direction: Direction, packed: Tensor) -> None:
        """Send a tensor to a row unless its node has got it in this step."""
        if (sent := (piece.number, node, direction, self._io.link_to_row(row))) not in self._sent:
            self._sent.add(sent)
            arrived = None
            if direction is Direction.SYNC_SHARE:
                arrived = partial(_arrived, self._deliveries, (piece.number, node, sent[-1]))
            self._io.send_to_row(row, self._key(piece, node, direction), packed, piece.elements, arrived)

    def _sum_up(self, unit: str) -> None:
        """Add other rows' subtrees to the pieces that this row owns, and send the sums."""
        work, own = self._work, self._plan.share.replica
        pieces = [piece for piece in self._plan.pieces[unit] if self._is_own(piece)]
        unsummed = [piece for piece in pieces if piece.number not in self._sums_of]
        kept = work.sources if self._hands_over else ()  # the heir may change
        for batch in self._sums.batches(unsummed):
            fold = self._sums.fold(batch)
            # The own row's come first, because they are here already.
            for node, row in sorted(work.sources.items(), key=lambda source: source[1] != own):
                for piece in batch:
                    held = self._held[piece.number]
                    if node not in held:
                        held[node] = self._take(row, piece, node, Direction.SYNC_SHARE)
                fold.put(node, [self._held[piece.number][node] for piece in batch])
            for piece, total in zip(batch, fold.nodes[ROOT], strict=True):
                self._sums_of[piece.number] = total
                held = self._held[piece.number]
                self._held[piece.number] = {node: held[node] for node in kept}
        for piece in pieces:
            for row in work.others:
                self._send(row, piece, ROOT, Direction.SYNC_SUM, self._sums_of[piece.number])

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

    def _owner(self, piece: Piece) -> int:
        """The row that sums a piece."""
        return self._work.owner(self._plan.owners[piece.number], piece.number)

    def _is_own(self, piece: Piece) -> bool:
        return self._owner(piece) == self._plan.share.replica

    def _root(self, piece: Piece) -> Tensor:
        if piece.number not in self._sums_of:
            self._sums_of[piece.number] = self._take(self._owner(piece), piece, ROOT, Direction.SYNC_SUM)
        if self._plan.share.rows == 1:
            return self._sums_of.pop(piece.number)  # nobody needs it again
        return self._sums_of[piece.number]

    def _take(self, row: int, piece: Piece, node: int, direction: Direction) -> Tensor:
        """A packed piece from another row. Raises BadTensorError if no encoder makes it."""
        key = self._key(piece, node, direction)
        is_gone = row in self._work.seats[0]
        packed = self._io.take_from_row(row, key, is_gone=is_gone)
        try:
            self._sums.check(piece, packed)
        except (PackedMismatchError, NonFiniteError) as error:
            if is_gone:
                self._io.missed(row)
                return self._take(row, piece, node, direction)  # waits until another row computes it
            raise BadTensorError(key, error, row) from error
        return packed

    def _key(self, piece: Piece, node: int, direction: Direction) -> TensorKey:
        epoch, step = self._place
        return TensorKey(epoch, step, node, piece.number, direction)
