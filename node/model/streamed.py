"""Blocks' weights (also frozen ones) and main gradients in host memory. They are on the device only while
their block computes.

The device holds the tensors of two blocks: of the block at work, and of the next one, which are copied in
meanwhile. Changed tensors of a third block stay until they are copied out (double buffering, as in LLMQ,
arXiv 2512.15306, section 3.1). Forward goes through the blocks in order, backward in reverse. Norms and the
optimizer's step go through them too.

Whole storages are moved, and the same tensors get them back, so no bit changes. A tensor whose storage is on
the host still has its shape, but no memory: call `use` before reading it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage, nn

from node.model.blocks import Block
from node.model.host_memory import HostMemory
from node.model.lora import FrozenWeight
from node.model.page_locked import pieces_of

AT_ONCE = 2
"""The number of blocks whose tensors are on the device."""


class _Unit:
    def __init__(self, tensors: Callable[[], Sequence[Tensor]], zero: Callable[[], None] | None) -> None:
        """
        Args:
            tensors: returns the block's current tensors.
            zero: sets them to 0.
        """
        self.tensors = tensors
        self.zero = zero
        self.storages: list[UntypedStorage] = []
        """The storages that are on the host, in order. It is empty while the device's copy is newer."""
        self.sizes: list[int] = []
        """The bytes of each storage."""
        self.on_device: list[Tensor] = []
        """The storages' bytes in pieces. It is empty while they are only on the host."""
        self.on_host: list[Tensor] = []
        """The storages' bytes on the host, in the same pieces."""
        self.coming: Any = None
        self.sent: Any = None
        """The marks of copies, each in a tuple, because a CPU's mark is None."""
        self.changed = True
        """Whether the device's copy is newer than the host's."""
        self.blank = False
        """Whether the tensors are all 0, so that neither copy is needed."""

    def lay(self) -> None:
        """Record the storages that are on the device and their sizes."""
        storages = {part._cdata: part for part in (tensor.untyped_storage() for tensor in self.tensors())}
        self.storages = list(storages.values())
        self.sizes = [storage.nbytes() for storage in self.storages]

    def lay_blank(self) -> None:
        """Record the storages and the sizes that they would have on the device."""
        sizes: dict[int, int] = {}
        storages: dict[int, UntypedStorage] = {}
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            end = (int(tensor.storage_offset()) + tensor.numel()) * tensor.itemsize
            storages[storage._cdata] = storage
            sizes[storage._cdata] = max(end, sizes.get(storage._cdata, 0))
        self.storages, self.sizes = list(storages.values()), list(sizes.values())

    def forget(self) -> None:
        """Forget the host's copy. Only the device's is valid from now on."""
        self.storages, self.sizes, self.on_device = [], [], []

    def pieces(self, device: torch.device) -> list[Tensor]:
        """The storages' bytes on the device, in pieces."""
        parts: list[Tensor] = []
        for storage, size in zip(self.storages, self.sizes, strict=True):
            whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
            parts += torch.split(whole, pieces_of(size))
        return parts


class Streamed:
    """Tensors of blocks, by unit. All passes of a stage and its optimizer share one object, on one thread."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._units: dict[str, _Unit] = {}
        self._there: dict[str, None] = {}
        """The units on the device or on their way to it. The most recently used comes last."""
        self._leaving: _Unit | None = None
        """The unit that is being copied out. It is still on the device."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._units)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(piece.nbytes for unit in self._units.values() for piece in unit.on_host)

    def add(
        self,
        name: str,
        tensors: Callable[[], Sequence[Tensor]],
        *,
        zero: Callable[[], None] | None = None,
        away: bool = False,
    ) -> None:
        """Add the unit that follows the ones added so far.

        Args:
            tensors: returns the unit's current tensors. No other unit shares their storages.
            zero: sets them to 0. It is needed only if `blank` is called.
            away: their storages are empty now, and their values start at 0.
        """
        unit = self._units[name] = _Unit(tensors, zero)
        if away:
            unit.blank, unit.changed = True, False
            return
        self._there[name] = None
        self._make_room([name])

    def use(self, name: str, *, back: bool = False) -> None:
        """Bring the unit's tensors to the device, and start fetching those of the next unit, or with `back`
        of the one before. Other units may leave. A unit that was not added is ignored."""
        if name not in self._units:
            return
        wanted = [name]
        names = list(self._units)
        place = names.index(name) + (-1 if back else 1)
        # A blank unit needs no copy.
        if 0 <= place < len(names) and not self._units[names[place]].blank:
            wanted.append(names[place])
        self._make_room(wanted)
        for unit in wanted:
            self._fetch(unit)
        self._arrived(self._units[name])
        self._there.pop(name)
        self._there[name] = None

    def changed(self, name: str) -> None:
        """Declare that the unit's tensors, which are in use, are written to or replaced."""
        if name in self._units:
            unit = self._units[name]
            unit.changed, unit.blank = True, False
            unit.forget()

    def blank(self) -> None:
        """Set all tensors to 0: their next use finds zeros. The caller then zeroes or drops the tensors on
        the device."""
        self._let_go()
        for name in self._there:
            self._arrived(self._units[name])
            self._units[name].forget()
        for unit in self._units.values():
            unit.blank, unit.changed = True, False

    def home(self) -> None:
        """Move everything back to the device, for good."""
        for name, unit in self._units.items():
            self._fetch(name)
            self._arrived(unit)
        self._units.clear()
        self._there.clear()

    def put_away(self) -> None:
        """Remove all units from the device until their next use."""
        for name in list(self._there):
            self._leave(name)
        self._let_go()

    def _make_room(self, wanted: Sequence[str]) -> None:
        """Remove the least recently used units, so that at most `AT_ONCE` are there together with the wanted
        ones."""
        others = [unit for unit in self._there if unit not in wanted]
        for unit in others[: max(0, len(others) + len(wanted) - AT_ONCE)]:
            self._leave(unit)

    def _leave(self, name: str) -> None:
        self._let_go()
        unit = self._units[name]
        self._arrived(unit)
        if unit.changed:
            unit.lay()
            unit.on_device = unit.pieces(self._memory.device)
            if [piece.nbytes for piece in unit.on_host] != [piece.nbytes for piece in unit.on_device]:
                unit.on_host = [self._memory.empty(piece.nbytes) for piece in unit.on_device]
            unit.sent = (self._memory.copy_out(zip(unit.on_device, unit.on_host, strict=True)),)
            unit.changed = False
            self._leaving = unit
        else:
            if unit.blank:
                unit.lay()
            self._free(unit)
        del self._there[name]

    def _let_go(self) -> None:
        """Wait for the unit that is being copied out, and free its memory on the device."""
        if self._leaving is not None:
            self._memory.wait(self._leaving.sent[0])
            self._free(self._leaving)
            self._leaving = None

    def _free(self, unit: _Unit) -> None:
        unit.on_device = []
        for storage in unit.storages:
            storage.resize_(0)

    def _fetch(self, name: str) -> None:
        unit = self._units[name]
        if name in self._there:
            return
        if unit is self._leaving:
            self._memory.wait(unit.sent[0])
            self._leaving = None
            self._there[name] = None
            return
        if unit.blank:
            unit.lay_blank()
        try:
            for storage, size in zip(unit.storages, unit.sizes, strict=True):
                storage.resize_(size)
            if not unit.blank:
                unit.on_device = unit.pieces(self._memory.device)
                unit.coming = (self._memory.copy_in(zip(unit.on_host, unit.on_device, strict=True)),)
        except Exception:  # memory may run out, and another plan follows: what is on the host still counts
            self._free(unit)
            raise
        self._there[name] = None
        if unit.blank:
            unit.forget()
            if unit.zero is not None:
                unit.zero()

    def _arrived(self, unit: _Unit) -> None:
        if unit.coming is not None:
            self._memory.wait(unit.coming[0])
            unit.coming = None


class Gradients(Protocol):
    """The part of `node.training.gradients.Gradients` that is used here."""

    def kept(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]: ...

    def make_zero(self, parameters: Iterable[nn.Parameter]) -> None: ...


class Streaming:
    """What a stage's chunks and its optimizer fetch from host memory."""

    def __init__(self) -> None:
        self.weights: Streamed | None = None
        """The weights of blocks' matrices; None while all are on the device."""
        self._frozen = False
        """Whether they are frozen weights, which the optimizer neither reads nor changes."""
        self.gradients: Streamed | None = None
        """The main gradients of blocks' matrices; None while all are on the device."""
        self.codes: Streamed | None = None
        """The codes that products in FP8 read instead of weights; None while all are on the device."""
        self.coded = False
        """Whether the products of all blocks are in FP8, so that passes do not read their weights."""
        self._to_come: list[str] = []
        """Units whose weights will stream once they are built."""
        self._to_code: list[str] = []
        """Units whose codes will stream once they are computed."""

    def built(self, unit: str, module: nn.Module) -> None:
        """Take the weights of a unit that has just been built. If its block is to stream, they may leave the
        device."""
        if unit in self._to_come and self.weights is not None:
            self._to_come.remove(unit)
            self._add_weights(self.weights, unit, module)

    def _add_weights(self, weights: Streamed, unit: str, module: nn.Module) -> None:
        frozen = [part.kept for part in module.modules() if isinstance(part, FrozenWeight)]
        trained = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
        self._frozen = bool(frozen)
        weights.add(unit, partial(list[Tensor], frozen or trained))

    def move_weights(
        self,
        memory: HostMemory,
        units: Collection[str],
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """Keep the weights of these units' matrices in host memory, and those of other units on the device.
        Adapters stay on the device; only their frozen matrices move.

        Args:
            units: the units in model order.
            blocks: the modules of all units; None before they are built, when `built` takes them.
        """
        if self.weights is not None and (*self.weights.names, *self._to_come) != (*units,):
            self.weights.home()
            self.weights = None
        if not units or self.weights is not None:
            return
        self.weights = Streamed(memory)
        if blocks is None:
            self._to_come = list(units)
            return
        for unit in units:
            self._add_weights(self.weights, unit, blocks[unit])

    def move_codes(self, memory: HostMemory, units: Collection[str], blocks: Mapping[str, Block]) -> None:
        """Like `move_weights`, for the codes of these units' blocks. Blocks without codes get them by
        `code`."""
        if self.codes is not None and (*self.codes.names, *self._to_code) != (*units,):
            self.codes.home()
            self.codes = None
        if not units or self.codes is not None:
            return
        self.codes = Streamed(memory)
        for unit in units:
            if blocks[unit].is_coded:
                self.codes.add(unit, blocks[unit].codes)
            else:
                self._to_code.append(unit)

    def move_gradients(
        self,
        memory: HostMemory,
        units: Collection[str],
        matrices: Mapping[str, Sequence[nn.Parameter]],
        gradients: Gradients,
        *,
        away: bool = False,
    ) -> None:
        """Like `move_weights`, for main gradients. With `away`, they have no memory yet."""
        if self.gradients is not None and self.gradients.names != (*units,):
            self.gradients.home()
            self.gradients = None
        if not units or self.gradients is not None:
            return
        self.gradients = Streamed(memory)
        for unit in units:
            zero = partial(gradients.make_zero, matrices[unit])
            self.gradients.add(unit, partial(gradients.kept, matrices[unit]), zero=zero, away=away)

    def begin_forward(self, unit: str) -> None:
        """Call it before a unit's forward."""
        if self._read is not None:
            self._read.use(unit)

    def end_forward(self, unit: str, output: Tensor) -> None:
        """Call it after a unit's forward. When backward arrives at `output`, it fetches what the unit
        needs."""
        if (self._read is not None or self.gradients is not None) and output.requires_grad:
            output.register_hook(lambda _: self._begin_backward(unit))  # type: ignore[no-untyped-call]

    def _begin_backward(self, unit: str) -> None:
        if self._read is not None:
            self._read.use(unit, back=True)
        if self.gradients is not None:
            self.gradients.use(unit, back=True)
            self.gradients.changed(unit)

    @property
    def _read(self) -> Streamed | None:
        """What passes read: codes or weights."""
        return self.codes if self.coded else self.weights

    def begin_passes(self) -> None:
        """Set gradients to 0, and remove weights that passes do not read."""
        if self.gradients is not None:
            self.gradients.blank()
        if self.weights is not None and self.coded:
            self.weights.put_away()

    def code(self, unit: str, block: Block) -> None:
        """Compute the codes of a unit's weights again."""
        self.use_weights(unit)
        if self.codes is not None and unit in self.codes.names:
            self.codes.use(unit)
            block.code_weights()
            self.codes.changed(unit)
            return
        block.code_weights()
        if self.codes is not None and unit in self._to_code:
            self._to_code.remove(unit)
            self.codes.add(unit, block.codes)

    def use_weights(self, unit: str, *, changed: bool = False) -> None:
        """Bring a unit's trained weights to the device. The caller reads them, or with `changed` writes
        them."""
        if self.weights is not None and not self._frozen:
            self.weights.use(unit)
            if changed:
                self.weights.changed(unit)

    def replace_frozen(self, unit: str) -> None:
        """Bring a unit's frozen weights to the device. The caller writes to them."""
        if self.weights is not None:
            self.weights.use(unit)
            self.weights.changed(unit)

    def use_gradients(self, unit: str, *, changed: bool = False) -> None:
        """Like `use_weights`, for main gradients."""
        if self.gradients is not None:
            self.gradients.use(unit)
            if changed:
                self.gradients.changed(unit)
