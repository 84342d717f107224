"""Weights, frozen ones too, and main gradients of blocks in host memory, on the device while their block is
at work.

The device holds those of two blocks: the block at work, and the next one's, which are copied in meanwhile.
Changed ones of a third block stay until they are copied out (double buffering: LLMQ, section 3.1). Forward
goes through the blocks in order, backward in reverse; norms and the optimizer's step go through them too.

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
"""Blocks whose tensors are on the device."""


class _Unit:
    """What one block has of it."""

    def __init__(self, tensors: Callable[[], Sequence[Tensor]], zero: Callable[[], None] | None) -> None:
        """
        Args:
            tensors: those that there are now.
            zero: makes them 0.
        """
        self.tensors = tensors
        self.zero = zero
        self.storages: list[UntypedStorage] = []
        """What is on the host, in order; empty while the device's is newer."""
        self.sizes: list[int] = []
        """Bytes of each."""
        self.on_device: list[Tensor] = []
        """Bytes of the storages in pieces; empty while they are on the host alone."""
        self.on_host: list[Tensor] = []
        """As many pieces."""
        self.coming: Any = None
        self.sent: Any = None
        """Marks of copies, in a tuple: a CPU's mark is None."""
        self.changed = True
        """The device's is newer than the host's."""
        self.blank = False
        """Neither counts: all of it is 0."""

    def lay(self) -> None:
        """Take down where it is on the device."""
        storages = {part._cdata: part for part in (tensor.untyped_storage() for tensor in self.tensors())}
        self.storages = list(storages.values())
        self.sizes = [storage.nbytes() for storage in self.storages]

    def lay_blank(self) -> None:
        """Take down what it would have, where there is nothing."""
        sizes: dict[int, int] = {}
        storages: dict[int, UntypedStorage] = {}
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            end = (int(tensor.storage_offset()) + tensor.numel()) * tensor.itemsize
            storages[storage._cdata] = storage
            sizes[storage._cdata] = max(end, sizes.get(storage._cdata, 0))
        self.storages, self.sizes = list(storages.values()), list(sizes.values())

    def forget(self) -> None:
        """The device's alone counts from now on."""
        self.storages, self.sizes, self.on_device = [], [], []

    def pieces(self, device: torch.device) -> list[Tensor]:
        """The storages' bytes, on the device."""
        found: list[Tensor] = []
        for storage, size in zip(self.storages, self.sizes, strict=True):
            whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
            found += torch.split(whole, pieces_of(size))
        return found


class Streamed:
    """Tensors of blocks, by unit. All of a stage's passes and its optimizer share one, on one thread."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._units: dict[str, _Unit] = {}
        self._there: dict[str, None] = {}
        """Units on the device, or on their way to it; the one used last comes last."""
        self._leaving: _Unit | None = None
        """Copied out, still on the device."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its units, in order."""
        return tuple(self._units)

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return sum(piece.nbytes for unit in self._units.values() for piece in unit.on_host)

    def add(
        self,
        name: str,
        tensors: Callable[[], Sequence[Tensor]],
        *,
        zero: Callable[[], None] | None = None,
        away: bool = False,
    ) -> None:
        """Take the unit that follows those before.

        Args:
            tensors: those that it has now. No other unit has a part of their storages.
            zero: makes them 0, if `blank` is ever called.
            away: their storages are empty, and they begin at 0.
        """
        unit = self._units[name] = _Unit(tensors, zero)
        if away:
            unit.blank, unit.changed = True, False
            return
        self._there[name] = None
        self._make_room([name])

    def use(self, name: str, *, back: bool = False) -> None:
        """The unit's tensors are on the device for its later work, and those of the unit after it, or with
        `back` of the one before, begin to come. Other units may leave. Units that are not here pass."""
        if name not in self._units:
            return
        wanted = [name]
        names = list(self._units)
        place = names.index(name) + (-1 if back else 1)
        # What is 0 has no way to come.
        if 0 <= place < len(names) and not self._units[names[place]].blank:
            wanted.append(names[place])
        self._make_room(wanted)
        for unit in wanted:
            self._fetch(unit)
        self._arrived(self._units[name])
        self._there.pop(name)
        self._there[name] = None

    def changed(self, name: str) -> None:
        """The unit's tensors, in use, are written to, or others are in their place."""
        if name in self._units:
            unit = self._units[name]
            unit.changed, unit.blank = True, False
            unit.forget()

    def blank(self) -> None:
        """Zero them: their next use finds zeros. The caller then zeroes or drops the tensors on the
        device."""
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
        """None of them is on the device until its next use."""
        for name in list(self._there):
            self._leave(name)
        self._let_go()

    def _make_room(self, wanted: Sequence[str]) -> None:
        """Those used longest ago leave, so that no more than `AT_ONCE` are there with these."""
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
        """What was copied out frees the device."""
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
    """The part of `node.training.gradients.Gradients` used here."""

    def kept(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]: ...

    def make_zero(self, parameters: Iterable[nn.Parameter]) -> None: ...


class Streaming:
    """What a stage's chunks and its optimizer fetch from host memory."""

    def __init__(self) -> None:
        self.weights: Streamed | None = None
        """Of blocks' matrices; None while all are on the device."""
        self._frozen = False
        """These are frozen ones, which the optimizer neither reads nor changes."""
        self.gradients: Streamed | None = None
        """The main gradients of these."""
        self.codes: Streamed | None = None
        """What products in FP8 read in place of weights."""
        self.coded = False
        """All blocks' products are in FP8, so that passes read no weights of theirs."""
        self._to_come: list[str] = []
        """Units whose weights stream once they are built."""
        self._to_code: list[str] = []
        """Units whose codes stream once they are made."""

    def built(self, unit: str, module: nn.Module) -> None:
        """A unit's weights are on the device: those of a block that is to stream leave."""
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
        """Keep the weights of these units' matrices in host memory, and those of others on the device. Where
        blocks have adapters, these stay, and the frozen matrices move.

        Args:
            units: in model order.
            blocks: of all units; None before they are built, for `built` to take.
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
        """As `move_weights`, of the codes of these units' blocks. Those that have none get them by `code`."""
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
        """As `move_weights`, of main gradients. `away`: they have no memory yet."""
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
        """Before a unit's forward."""
        if self._read is not None:
            self._read.use(unit)

    def end_forward(self, unit: str, output: Tensor) -> None:
        """`output` is what it returned: backward fetches what it needs when it has come there."""
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
        """What passes read."""
        return self.codes if self.coded else self.weights

    def begin_passes(self) -> None:
        """Gradients begin at 0, and weights that passes do not read leave."""
        if self.gradients is not None:
            self.gradients.blank()
        if self.weights is not None and self.coded:
            self.weights.put_away()

    def code(self, unit: str, block: Block) -> None:
        """Code the weights of a unit's block again."""
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
        """Trained ones are on the device, where the caller reads them, or changes them."""
        if self.weights is not None and not self._frozen:
            self.weights.use(unit)
            if changed:
                self.weights.changed(unit)

    def replace_frozen(self, unit: str) -> None:
        """The unit's frozen weights are on the device, where the caller writes to them."""
        if self.weights is not None:
            self.weights.use(unit)
            self.weights.changed(unit)

    def use_gradients(self, unit: str, *, changed: bool = False) -> None:
        """As `use_weights`."""
        if self.gradients is not None:
            self.gradients.use(unit)
            if changed:
                self.gradients.changed(unit)
