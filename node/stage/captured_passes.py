"""A chunk's passes as CUDA graphs: captured once, then replayed with one call each.

A block's two passes are about a hundred small kernels. With the small microbatches of slow links, launching
them takes longer than running them; a graph launches them all at once. It reads and writes fixed addresses,
so every microbatch in flight has a *slot*: buffers for its input, its result and the gradients of both, and a
graph for each pass. Slots are captured when first needed, from the second step of a placement on: the first
step runs through autograd, because a capture cannot contain compilation or the choice of algorithms.

Graphs run the same kernels on the same values as autograd, so the result is bit-identical (tests/gpu). Three
things differ:

- Weights that autocast casts are cast once per step instead of once per microbatch, into leaves that replace
  the parameters, also in passes through autograd.
- Gradients of leaves are added to the main gradients inside the graph, so main gradients never move.
- Each slot's forward has its own memory, because another slot's forward may run before its backward. The
  backwards of all slots share memory, because a backward leaves nothing behind.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kernels.attention.reach import Documents
from kernels.common.matrices import empty_together
from node.model.blocks import Block
from node.model.chunk import HALVES, Chunk
from node.stage.passes import AutogradPasses, ChunkCall
from node.training.gradients import Gradients

log = logging.getLogger(__name__)

Work = Callable[[], None]


class Recorder(Protocol):
    def record(self, work: Work, *, apart: bool) -> Work:
        """Record the device work of `work` without running it; returns a function that replays it.

        Args:
            apart: use separate memory from other recordings.

        Raises RuntimeError if the work cannot be recorded or memory is full.
        """
        ...


class CudaRecorder:
    """Records work as CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._shared = torch.cuda.graph_pool_handle()

    def record(self, work: Work, *, apart: bool) -> Work:
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if apart else self._shared
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), _without_collecting(), self._closing(pool):
            # Other threads pack and unpack meanwhile; this capture must not include their work.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    @contextmanager
    def _closing(self, pool: tuple[int, int]) -> Iterator[None]:
        """End the allocator's capture state if the capture fails."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, pool)
            raise


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable cycle collection: freeing another graph breaks a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(slots=True)
class _Slot:
    """One microbatch's buffers and graphs."""

    fed: Tensor
    labels: Tensor | None
    documents: Documents | None = None
    gradient: Tensor | None = None
    """The gradient of the result; None for a loss."""
    result: Tensor = field(init=False)
    forward: Work = field(init=False)
    backward: Work = field(init=False)


class CapturedPasses:
    """The passes of one chunk, with the methods of `AutogradPasses`, by replay. The first step runs through
    autograd, and all steps if capturing fails.

    Everything runs on the caller's current stream.
    """

    def __init__(
        self,
        chunk: Chunk,
        gradients: Gradients,
        precision: str,
        device: torch.device,
        shares: int,
        recorder: Recorder,
        *,
        weighs_loss: bool = False,
    ) -> None:
        """
        Args:
            gradients: of the chunk's parameters; their memory stays the same.
            precision, shares, weighs_loss: as for `AutogradPasses`.
        """
        self._module = ChunkCall(chunk)
        self._gradients = gradients
        self._recorder = recorder
        self._casts: list[tuple[Tensor, Tensor]] = []
        # Do not capture `self`: a cycle would keep a dropped stage's memory until cycles are collected.
        leaves, module = self._make_leaves(precision), self._module
        self._leaves = leaves
        self._by_autograd = AutogradPasses(
            lambda fed, labels, documents, _: functional_call(module, leaves, (fed, labels, documents)),
            precision,
            device,
            shares,
            weighs_loss=weighs_loss,
        )
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._in_flight: dict[int, _Slot] = {}
        self._ran = False
        """Whether a backward has run through autograd."""
        self._warm = False
        self._refused = False

    @property
    def slots(self) -> int:
        """The number of microbatches that have graphs."""
        return len(self._slots)

    def begin_step(self, loss_weight: float = 1.0) -> None:
        self._by_autograd.begin_step(loss_weight)
        self._in_flight.clear()
        self._free = list(self._slots)
        self._warm = self._ran
        self.weights_changed()

    def weights_changed(self) -> None:
        if self._casts:
            torch._foreach_copy_([copy for copy, _ in self._casts], [whole for _, whole in self._casts])

    def forward(
        self,
        microbatch: int,
        fed: Tensor,
        labels: Tensor | None,
        documents: Documents | None = None,
        number: int = 0,
    ) -> Tensor:
        slot = self._slot(fed, labels, documents) if torch.is_grad_enabled() else None
        if slot is None:
            return self._by_autograd.forward(microbatch, fed, labels, documents, number)
        with torch.no_grad():
            slot.fed.copy_(fed)
            if slot.labels is not None and labels is not None:
                slot.labels.copy_(labels)
            if slot.documents is not None and documents is not None:
                slot.documents.copy_(documents)
        slot.forward()
        self._in_flight[microbatch] = slot
        # A copy: the slot is reused while this result may still be in transfer.
        return slot.result.detach().clone()

    def backward(self, microbatch: int, gradient: Tensor | None, number: int = 0) -> Tensor | None:
        slot = self._in_flight.pop(microbatch, None)
        if slot is None:
            self._ran = True
            if self._slots or self._refused:
                # Graphs keep leaves on their capture stream; autograd waits for it and would warn, once.
                torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
            return self._by_autograd.backward(microbatch, gradient, number)
        if slot.gradient is not None and gradient is not None:
            slot.gradient.copy_(gradient)
        slot.backward()
        self._gradients.added(self._module.parameters())
        self._free.append(slot)
        return None if slot.fed.grad is None else slot.fed.grad.clone()

    # ---- recording

    def _slot(self, fed: Tensor, labels: Tensor | None, documents: Documents | None) -> _Slot | None:
        """A free or new slot. None in the first step, after capturing failed, or for a microbatch with more
        documents than graphs are captured for."""
        if documents is not None and self._slots and not documents.like(_present(self._slots[0].documents)):
            return None
        if self._free:
            return self._free.pop()
        if not self._warm or self._refused:
            return None
        if not self._slots and fed.device.type == "cuda":
            # Free autograd's cached memory: graphs use separate memory.
            torch.cuda.empty_cache()
        try:
            slot = self._record(fed, labels, documents)
        except RuntimeError as error:
            self._refused = True
            reason = str(error).strip().split("\n")[0]
            log.warning("only %s passes are captured: %s", len(self._slots), reason)
            for leaf in self._leaves.values():
                leaf.grad = None
            return None
        self._slots.append(slot)
        return slot

    def _record(self, fed: Tensor, labels: Tensor | None, documents: Documents | None) -> _Slot:
        slot = _Slot(
            fed.detach().clone(),
            None if labels is None else labels.clone(),
            None if documents is None else documents.clone(),
        )
        if slot.fed.is_floating_point():
            slot.fed.requires_grad_()

        def forward() -> None:
            slot.result = self._by_autograd.run(slot.fed, slot.labels, slot.documents)

        def backward() -> None:
            slot.fed.grad = None
            # Keep the buffers that forward saved.
            torch.autograd.backward(slot.result, slot.gradient, retain_graph=True)

        slot.forward = self._recorder.record(forward, apart=True)
        if labels is None:
            slot.gradient = torch.empty_like(slot.result)
        slot.backward = self._recorder.record(backward, apart=False)
        return slot

    def _make_leaves(self, precision: str) -> dict[str, Tensor]:
        """Leaves that replace the parameters, in the same memory or as copies in autocast's precision."""
        copies = self._copies(HALVES[precision]) if precision in HALVES else {}
        leaves: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            leaf = parameter.detach()
            if name in copies:
                leaf = copies[name].copy_(leaf)
                self._casts.append((leaf, parameter.detach()))
            leaf = leaf.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch's
                self._adding_to(parameter)
            )
            leaves[name] = leaf
        return leaves

    def _copies(self, half: torch.dtype) -> dict[str, Tensor]:
        """Memory for projections' parameters in half precision. Autocast leaves embeddings and norms alone.

        Weights that are multiplied together are adjacent, so that no product copies them again.
        """
        linears = {
            module: path for path, module in self._module.named_modules() if isinstance(module, nn.Linear)
        }
        blocks = [layer for layer in self._module.chunk.layers if isinstance(layer, Block)]
        # In FP8, products use separate codes of these weights.
        coded = {
            product.weight
            for block in blocks
            if block.is_coded
            for group in block.products()
            for product in group
        }
        copies = {
            f"{path}.{name}": torch.empty_like(parameter, dtype=half)
            for module, path in linears.items()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dtype != half and parameter not in coded
        }
        for block in blocks:
            for together in () if block.is_coded else block.products():
                if len(together) < 2 or not all(module in linears for module in together):
                    continue  # a single projection, or one with adapters
                weights = [module.weight for module in together]
                if all(weight.dtype != half for weight in weights):
                    parts = empty_together(weights, half)
                    for module, part in zip(together, parts, strict=True):
                        copies[f"{linears[module]}.weight"] = part
        return copies

    def _adding_to(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        # Do not capture `self` in the hook: a cycle through a torch hook is never collected.
        gradients = self._gradients

        def add(leaf: Tensor) -> None:
            if leaf.grad is not None:  # otherwise the product has added it
                gradients.add(parameter, leaf.grad)
                leaf.grad = None

        return add


def _present(documents: Documents | None) -> Documents:
    assert documents is not None, "microbatches of a run have all documents or none"
    return documents
