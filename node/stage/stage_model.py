"""What a stage computes with: its model chunks, their optimizer, and microbatches between their two passes.

Knows no schedule and no network; the executor says what to run. `node.parallel.group` does the same over
several devices.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from node.config.schema import RunConfig
from node.model.chunk import Chunk, build_chunk, weight_dtype
from node.model.tensor_rank import TensorRank
from node.pipeline.memory import stage_storages
from node.pipeline.placement import chunk_units
from node.stage.captured_passes import CapturedPasses, CudaRecorder
from node.stage.passes import AutogradPasses, ChunkCall, Passes
from node.training.optimizer import StageOptimizer


class StageModel:
    """On one device. Chunks are local: 0 for the first that this stage holds."""

    ranks = 1
    """How many of these share a microbatch's tokens."""
    rank = 0
    """This one's number among them."""
    tensor_rank = TensorRank()
    """This one's place among those that share its blocks."""
    captures = True
    """Passes hold no collectives, so CUDA graphs may."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._chunks: list[Chunk] = []
        self._optimizer: StageOptimizer | None = None
        self._passes: list[Passes] = []

    def build(self, stage: int, stages: int) -> None:
        """Make this stage's chunks with their initial weights, and a fresh optimizer."""
        config = self.config
        # First, as a rollback in the same place would hold two of everything. Not `self.drop()`: of several
        # devices the one that leads would tell the others to drop what they are to build.
        StageModel.drop(self)
        self._chunks = [
            build_chunk(
                config.model,
                units,
                config.run.seed,
                self.device,
                weight_dtype(config.training.weights),
                stage_storages(config, stages)[stage],
                self.tensor_rank,
            )
            for units in chunk_units(config, stages)[stage::stages]
        ]
        captured = self.captures and config.training.cuda_graphs and self.device.type == "cuda"
        self._optimizer = StageOptimizer(
            self._chunks, config.training, config.run.seed, self.tensor_rank, gradients_in_place=captured
        )
        precision, shares = config.training.precision, config.microbatches * self.ranks
        if captured:
            recorder, gradients = CudaRecorder(self.device), self._optimizer.gradients
            self._passes = [
                CapturedPasses(chunk, gradients, precision, self.device, shares, recorder)
                for chunk in self._chunks
            ]
        else:
            self._passes = [
                AutogradPasses(ChunkCall(chunk), precision, self.device, shares) for chunk in self._chunks
            ]

    def drop(self) -> None:
        """Hold nothing."""
        self._passes = []
        self._chunks = []
        self._optimizer = None

    def load_unit_state(self, unit: str, state: Mapping[str, Tensor]) -> None:
        """As `StageOptimizer.load_unit_state`."""
        self.optimizer.load_unit_state(unit, state)

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        """As `StageOptimizer.unit_state`, always whole."""
        return self.optimizer.unit_state(unit)

    # ---- a step

    def begin_step(self) -> None:
        """Drop what an unfinished step left."""
        for passes in self._passes:
            passes.begin_step()
        self.optimizer.zero_grad()

    def forward(self, chunk: int, microbatch: int, fed: Tensor, labels: Tensor | None = None) -> Tensor:
        """One chunk's forward.

        Args:
            fed: token ids [B, S] int64 or hidden [B, S, C] float32.
            labels: [B, S] int64, for the chunk that holds the head.

        Returns:
            Hidden [B, S, C] float32, or with `labels` the microbatch's share of the mean loss; no graph.
        """
        return self._passes[chunk].forward(microbatch, fed, labels)

    def backward(self, chunk: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """The backward of what `forward` has run.

        Args:
            gradient: of the hidden states that it returned; None for the loss.

        Returns:
            The gradient of what was fed [B, S, C], None if that was token ids.
        """
        # Before the passes: additions to gradients may be part of a captured graph.
        self.optimizer.begin_backward(microbatch, self.rank)
        return self._passes[chunk].backward(microbatch, gradient)

    def finish_step(self) -> None:
        """All backwards of the step have run: make the gradients whole."""

    def squared_norms(self) -> dict[str, float]:
        """As `StageOptimizer.squared_norms`, of the whole stage."""
        return self.optimizer.squared_norms()

    def apply(self, lr: float, clip_coefficient: float) -> None:
        """As `StageOptimizer.apply`."""
        self.optimizer.apply(lr, clip_coefficient)

    # ---- gradients of single parameters

    def tied_gradient(self, unit: str) -> Tensor:
        """The gradient of the unit's copy of the tied weight, float32."""
        return self.optimizer.gradients.get(self._tied_weight(unit)).float()

    def put_tied_gradient(self, unit: str, value: Tensor) -> None:
        """Replace it."""
        self.optimizer.gradients.put(self._tied_weight(unit), value)

    def any_gradient(self) -> Tensor | None:
        """One that is there, for faults to spoil."""
        # A matrix's may be kept elsewhere, in e4m3.
        return next((p.grad for p in self._chunks[0].parameters() if p.grad is not None), None)

    @property
    def optimizer(self) -> StageOptimizer:
        assert self._optimizer is not None, "build() comes before everything else"
        return self._optimizer

    def _tied_weight(self, unit: str) -> nn.Parameter:
        parameter = next(chunk for chunk in self._chunks if unit in chunk.units).tied_parameter(unit)
        assert parameter is not None, "called for a tied model alone"
        return parameter
