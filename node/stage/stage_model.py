"""A stage's model: its chunks, their optimizer, and the microbatches between forward and backward.

It knows no schedule and no network: the executor decides what runs. `StageModel` runs on one device;
`node.stage.group` runs one on each of several devices.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from kernels.attention.reach import Documents
from kernels.common.dispatch import in_double, kind_of
from kernels.fp8.reference import Fp8Gradient
from node.config.schema import RunConfig
from node.model.blocks import Block
from node.model.chunk import Chunk, build_chunk, weight_dtype
from node.model.host_memory import HostMemory, host_memory
from node.model.offload import Offload
from node.model.storage import Storage
from node.model.streamed import Streaming
from node.model.tensor_rank import TensorRank
from node.model.units import is_block
from node.schedule.placement import chunk_units, slice_ranges
from node.stage.allocator import begin_peak, most_allocated
from node.stage.captured_passes import CapturedPasses, CudaRecorder
from node.stage.memory_control import MemoryControl
from node.stage.out_of_memory import ran_out
from node.stage.passes import AutogradPasses, ChunkCall
from node.stage.state_copy import StateCopy, weights_of
from node.state.unit_state import FROZEN_PREFIX
from node.training.local_steps import LocalSteps
from node.training.optimizer import StageOptimizer, StateTensor
from node.tuning.memory import stage_storages
from node.tuning.memory_plan import MemoryPlan, Room
from node.tuning.state_moves import moved_blocks
from node.tuning.storage_choice import allowed_storages, chosen_config

log = logging.getLogger(__name__)


class OneDevice:
    """The devices of a node that computes on a single one, with the methods of `DeviceGroup`."""

    def __init__(self, first: torch.device) -> None:
        self.first = first

    def start(self, config: RunConfig, room: Room | None = None) -> "StageModel":
        return StageModel(config, self.first, room=room)

    async def watch(self) -> None:
        """Return at once, because there is no other process."""

    def exhausted(self) -> None:
        return None

    def close(self, *, broken: bool = False) -> None:
        """Do nothing, because there is nothing to end."""


class StageModel:
    """A stage's model on one device. Chunks are numbered within the stage, from 0."""

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        *,
        ranks: int = 1,
        rank: int = 0,
        tensor_rank: TensorRank | None = None,
        room: Room | None = None,
        host: HostMemory | None = None,
    ) -> None:
        """
        Args:
            ranks: processes of the node that share a microbatch's tokens; this one is number `rank`. The
                passes of several contain collectives, so they are not captured as CUDA graphs.
            tensor_rank: this process among those that share its blocks.
            room: the memory to fit in, by recomputing and by moving tensors to host memory; None: keep
                everything where it is.
            host: the host memory to move to; the device's own by default.
        """
        self.config = config
        self.device = device
        self.ranks = ranks
        self.rank = rank
        self.tensor_rank = tensor_rank or TensorRank()
        self._slices = slice_ranges(config)
        self._room = room or Room()
        self._chunks: list[Chunk] = []
        self._optimizer: StageOptimizer | None = None
        self._local: LocalSteps | None = None
        self._passes: list[AutogradPasses | CapturedPasses] = []
        self._host = host
        self._offload: Offload | None = None
        self._control: MemoryControl | None = None
        self._storage = Storage()
        """How this stage of the run stores activations."""
        self._captured = False
        self._copy: StateCopy | None = None
        """The copy of the state that was given out and is still read, if any."""
        self._moving = threading.RLock()
        """Held while state moves, or a copy of it begins."""

    def build(self, stage: int, stages: int, storage: int | None = None, *, is_drawn: bool = True) -> None:
        """Create this stage's chunks with their initial weights, and a fresh optimizer.

        Args:
            storage: the storage of activations, from `allowed_storages`; None: the run file's.
            is_drawn: as for `build_chunk`.
        """
        config = self.config
        if storage is not None:
            config = chosen_config(config, allowed_storages(config)[storage])
        # Drop the old chunks first: a rollback on the same stage would hold everything twice.
        self.drop()
        own = chunk_units(config, stages)[stage::stages]
        self._storage = stage_storages(config, stages)[stage]
        self._control = MemoryControl(config, stages, stage, self._room)
        plan = self._control.plan
        blocks = [unit for units in own for unit in units if is_block(unit)]
        storages = dict(zip(blocks, plan.storages(self._storage), strict=True))
        self._move(plan)
        streaming = Streaming()
        if self._host is not None:
            streaming.move_weights(self._host, moved_blocks(blocks, plan.state.weights))
        self._chunks = [
            build_chunk(
                config.model,
                units,
                config.run.seed,
                self.device,
                weight_dtype(config.training.weights),
                storages,
                self.tensor_rank,
                config.lora,
                streaming.built,
                is_drawn=is_drawn,
            )
            for units in own
        ]
        for chunk in self._chunks:
            chunk.streaming = streaming
            chunk.masks_labels = config.data.masks_labels
            if chunk.dropout is not None:
                chunk.dropout.row = self.rank // self.tensor_rank.count
        self._move(plan)
        captured = self.ranks == 1 and config.training.cuda_graphs and kind_of(self.device).graphs
        # Each slice has a different length and attends to different keys.
        captured = captured and len(self._slices) == 1
        # Copies to the host are ordered by events of passes that run operation by operation.
        captured = captured and plan.graphs and not plan.moves and not plan.streams
        self._optimizer = StageOptimizer(
            self._chunks,
            config.training,
            config.run.seed,
            self.tensor_rank,
            gradients_in_place=captured,
            host=self._host if plan.state.moments else None,
            streaming=streaming,
            gradients_away=moved_blocks(blocks, plan.state.gradients),
            codes_away=moved_blocks(blocks, plan.state.codes),
            slices=len(self._slices),
        )
        self._local = LocalSteps(config, self._optimizer, self._weights_changed)
        self._captured = captured
        self._passes = self._make_passes()

    def _weights_changed(self) -> None:
        for passes in self._passes:
            passes.weights_changed()

    def _make_passes(self) -> list[AutogradPasses | CapturedPasses]:
        config, device = self.config, self.device
        precision, shares = config.training.precision, config.microbatches * self.ranks
        for chunk in self._chunks:
            chunk.share_loss(1 / shares)
        if self._captured:
            recorder, gradients = CudaRecorder(device), self.optimizer.gradients
            return [
                CapturedPasses(
                    chunk, gradients, precision, device, shares, recorder, weighs_loss=config.weighs_loss
                )
                for chunk in self._chunks
            ]
        return [
            AutogradPasses(
                ChunkCall(chunk),
                precision,
                device,
                shares,
                weighs_loss=config.weighs_loss,
                slices=self._slices,
            )
            for chunk in self._chunks
        ]

    # ---- the plan of memory

    def _move(self, plan: MemoryPlan) -> None:
        """Allocate the host memory that this plan needs."""
        if plan.moves or plan.state.moments:
            self._host = self._host or host_memory(self.device)
        if plan.moves and self._offload is None and self._host is not None:
            self._offload = Offload(self._host)
        for chunk in self._chunks:
            chunk.offload = self._offload

    def adapt(self) -> None:
        """Call between two steps. If the last one took other memory than planned, and another plan is better,
        continue with that plan. The bits stay the same."""
        # Each of several devices would measure for itself, but all must recompute the same collectives.
        if self._control is None or self.ranks > 1:
            return
        plan = self._control.step_done(most_allocated(self.device))
        if plan is not None:
            log.warning("memory is planned again from measured steps: %s", _words(plan))
            self._change(plan)

    def relieve(self) -> bool:
        """Call between two attempts of a step, the first of which ran out of memory. Recompute more or move
        more to host memory. Returns whether anything was left to do."""
        if not self._degrades or self._control is None:
            return False
        plan = self._control.ran_short()
        if plan is None:
            return False
        log.warning("%s ran out of memory: from now on %s", self.device, _words(plan))
        self.begin_step()
        self._change(plan)
        return True

    @property
    def _degrades(self) -> bool:
        """Whether a stage out of memory can continue. Out of main memory, its system ends the process."""
        room = self._room
        return self.ranks == 1 and not room.devices.on_cpu and room.memory_bytes > 0

    def _change(self, plan: MemoryPlan) -> None:
        """Continue with another plan, between two steps."""
        self._store(plan)
        self._move_state(plan)
        if self._captured:
            # Graphs contain the old plan. Where plans change, passes are rarely so small that graphs matter.
            self._captured = False
            self._passes = self._make_passes()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _move_state(self, plan: MemoryPlan) -> None:
        """Between two steps, move state to the host or the device as planned."""
        optimizer, blocks = self.optimizer, [unit for unit in self.optimizer.units if is_block(unit)]
        with self._moving:
            if plan.state.weights or plan.state.moments:
                self._settle()
            optimizer.move_moments(self._host if plan.state.moments else None)
            if self._host is not None:
                optimizer.move_weights(self._host, moved_blocks(blocks, plan.state.weights))
                optimizer.move_gradients(self._host, moved_blocks(blocks, plan.state.gradients))
                optimizer.move_codes(self._host, moved_blocks(blocks, plan.state.codes))

    def _store(self, plan: MemoryPlan) -> None:
        """Let blocks store as planned, from their next forward on."""
        self._move(plan)
        blocks = [layer for chunk in self._chunks for layer in chunk.layers if isinstance(layer, Block)]
        for block, storage in zip(blocks, plan.storages(self._storage), strict=True):
            block.storage = storage

    def drop(self) -> None:
        """Free everything."""
        self._settle()
        self._control = None
        self._passes = []
        self._chunks = []
        self._optimizer = self._local = None
        if self._host is not None:
            # Copies may still use the memory that is freed now.
            self._host.settle()
        self._offload = None

    def load_unit_state(self, unit: str, state: Mapping[str, Tensor]) -> None:
        """See `StageOptimizer.load_unit_state`. Also loads frozen weights, whose names begin with
        `frozen.`"""
        frozen = {
            name.removeprefix(FROZEN_PREFIX): tensor
            for name, tensor in state.items()
            if name.startswith(FROZEN_PREFIX)
        }
        if frozen:
            next(chunk for chunk in self._chunks if unit in chunk.units).load_frozen(unit, frozen)
            state = {name: tensor for name, tensor in state.items() if not name.startswith(FROZEN_PREFIX)}
        self._settle()
        if state:
            self.optimizer.load_unit_state(unit, state)

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        """See `StageOptimizer.unit_state`; of the complete unit."""
        return self.optimizer.unit_state(unit)

    def copy_state(
        self, extra: Mapping[str, Mapping[str, Tensor]], *, weights_alone: bool = False
    ) -> StateCopy:
        """The state of all units with `extra` tensors of some, or only their weights, to be read until the
        state changes."""
        optimizer = self.optimizer

        def units() -> Iterator[tuple[str, dict[str, StateTensor]]]:
            for unit in optimizer.units:
                state = optimizer.unit_tensors(unit)
                state |= {
                    name: StateTensor(tensor, tensor.dtype) for name, tensor in extra.get(unit, {}).items()
                }
                yield unit, weights_of(state) if weights_alone else state

        with self._moving:
            self._settle()
            self._copy = StateCopy(units(), stays=self.state_stays)
            return self._copy

    @property
    def state_stays(self) -> bool:
        """Whether the whole state is in place, and does not change, until a step's commit."""
        # Rounds change weights before the vote, and restore them.
        return self.optimizer.stays_in_place and self.config.sync.every == 1

    def _settle(self) -> None:
        """Prepare for a change or move of the state."""
        with self._moving:
            copy, self._copy = self._copy, None
            if copy is not None:
                copy.settle()

    # ---- a step

    def begin_step(self, loss_weight: float = 1.0) -> None:
        """Drop the rest of an unfinished step. `loss_weight`: as for `AutogradPasses.begin_step`."""
        for passes in self._passes:
            passes.begin_step(loss_weight)
        if self._offload is not None:
            self._offload.begin_step()
        self.optimizer.zero_grad()
        if self._control is not None:
            # If the plan changed within a step, state could not be moved then.
            self._move_state(self._control.plan)
        begin_peak(self.device)

    def forward(
        self,
        chunk: int,
        microbatch: int,
        fed: Tensor,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        number: int = 0,
    ) -> Tensor:
        """Run one chunk's forward, for a microbatch or for a slice of it, whose S positions the tensors hold.

        Args:
            fed: token ids [B, S] int64 or hidden [B, S, C] float32.
            labels: [B, S] int64, for the chunk that holds the head.
            documents: where documents begin, bool on the CPU, [B, S] or [B, the slice's end]; None: one per
                sample.
            number: the slice. Slices run forward in ascending order, and backward in descending order.

        Returns:
            Hidden [B, S, C] float32, or with `labels` the microbatch's share of the mean loss; no graph.
        """
        apart = None if documents is None else Documents.of(documents, self.device)
        while True:
            self.optimizer.begin_forward(microbatch * len(self._slices) + number)
            try:
                return self._passes[chunk].forward(microbatch, fed, labels, apart, number)
            except Exception as error:  # torch raises several types when memory runs out; others pass
                if self._captured or not self._degrades or not ran_out(error):
                    raise
                failed = error
            # Done here because `error` no longer holds the forward's tensors. Microbatches in flight keep
            # theirs; a forward changes nothing else, so it runs again.
            if not self._relieve_forward():
                raise failed

    def _relieve_forward(self) -> bool:
        """Within a step, keep less in the next forwards. State is not moved."""
        plan = None if self._control is None else self._control.ran_short()
        if plan is None:
            return False
        log.warning("%s ran out of memory: from now on %s", self.device, _words(plan))
        self._store(plan)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def backward(
        self, chunk: int, microbatch: int, gradient: Tensor | None, number: int = 0
    ) -> Tensor | None:
        """Run the backward for one chunk's `forward`.

        Args:
            gradient: the gradient of the returned hidden states; None for the loss.

        Returns:
            The gradient of the chunk's input [B, S, C]; None for token ids.
        """
        # Before the passes, because a captured graph may contain the additions to gradients.
        self.optimizer.begin_backward(microbatch * len(self._slices) + number, self.rank)
        return self._passes[chunk].backward(microbatch, gradient, number)

    def finish_step(self) -> None:
        """Complete the gradients after all backwards of the step."""

    def take_gradients(self, units: Sequence[str]) -> dict[str, dict[str, Tensor | Fp8Gradient]]:
        """Complete gradients by unit and parameter, after all backwards of a gradient group for these units.
        The caller keeps them, and the gradients restart at 0."""
        return {unit: self.optimizer.take_gradients(unit) for unit in units}

    def put_gradients(self, unit: str, values: Mapping[str, Tensor]) -> None:
        """See `StageOptimizer.put_gradients`; replaces `finish_step`."""
        self.optimizer.put_gradients(unit, values)

    def squared_norms(self) -> dict[str, float]:
        """See `StageOptimizer.squared_norms`; of the complete stage."""
        return self.optimizer.squared_norms()

    def expert_load(self) -> tuple[float, int]:
        """`expert_load` and `dead_experts` of `wire.figures.StageFigures`, since the stage was built."""
        loads = [load for chunk in self._chunks for load in chunk.loads()]
        if not loads:
            return 0.0, 0
        rows = in_double(torch.stack(loads))
        uneven = (rows.amax(1) / rows.mean(1).clamp(min=1.0)).max()
        # A single copy from the device, for which the step's norms have waited already.
        most, dead = torch.stack((uneven, (rows == 0).sum().double())).tolist()
        return most, int(dead)

    def apply(self, lr: float, clip_coefficient: float) -> None:
        """See `StageOptimizer.apply`."""
        self._settle()
        self.optimizer.apply(lr, clip_coefficient)

    # ---- gradients of single parameters

    def tied_gradient(self, unit: str) -> Tensor:
        """The gradient of the unit's copy of the tied weight, float32."""
        return self.optimizer.gradients.get(self._tied_weight(unit)).float()

    def put_tied_gradient(self, unit: str, value: Tensor) -> None:
        """Replace the gradient of the unit's copy of the tied weight."""
        self.optimizer.gradients.put(self._tied_weight(unit), value)

    def any_gradient(self) -> Tensor | None:
        """Any gradient, for injected faults to corrupt."""
        # Gradients of matrices may be stored elsewhere, in e4m3, or in host memory.
        grads = (p.grad for p in self._chunks[0].parameters() if p.grad is not None)
        return next((gradient for gradient in grads if gradient.untyped_storage().nbytes()), None)

    @property
    def optimizer(self) -> StageOptimizer:
        assert self._optimizer is not None, "build() comes before everything else"
        return self._optimizer

    @property
    def local(self) -> LocalSteps:
        """The local steps of the complete stage."""
        assert self._local is not None, "build() comes before everything else"
        return self._local

    def _tied_weight(self, unit: str) -> nn.Parameter:
        parameter = next(chunk for chunk in self._chunks if unit in chunk.units).tied_parameter(unit)
        assert parameter is not None, "only called for a tied model"
        return parameter


def _words(plan: MemoryPlan) -> str:
    return f"{plan.text() or 'everything is kept'}; about {plan.added:.0%} more time, same bits"
