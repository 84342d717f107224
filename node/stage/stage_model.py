"""What a stage computes with: its model chunks, their optimizer, and microbatches between their two passes.

Knows no schedule and no network; the executor says what to run. `node.parallel.group` does the same over
several devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from node.config.schema import RunConfig
from node.model.chunk import Chunk, build_chunk, compute_precision, weight_dtype
from node.model.placement import chunk_units, stage_storages
from node.model.tensor_rank import TensorRank
from node.training.optimizer import StageOptimizer


@dataclass(frozen=True)
class _InFlight:
    """A microbatch between its forward and its backward on one chunk."""

    source: Tensor | None
    """The chunk's input, a leaf whose gradient goes upstream; None for token ids."""
    result: Tensor
    """The chunk's output, or the microbatch's share of the loss."""


class StageModel:
    """On one device. Chunks are local: 0 for the first that this stage holds."""

    ranks = 1
    """How many of these share a microbatch's tokens."""
    tensor_rank = TensorRank()
    """This one's place among those that share its blocks."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._chunks: list[Chunk] = []
        self._optimizer: StageOptimizer | None = None
        self._in_flight: dict[tuple[int, int], _InFlight] = {}

    def build(self, stage: int, stages: int) -> None:
        """Make this stage's chunks with their initial weights, and a fresh optimizer."""
        config = self.config
        self._in_flight.clear()
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
        self._optimizer = StageOptimizer(self._chunks, config.training, config.run.seed, self.tensor_rank)

    def drop(self) -> None:
        """Hold nothing."""
        self._chunks = []
        self._optimizer = None
        self._in_flight.clear()

    def load_unit_state(self, unit: str, state: Mapping[str, Tensor]) -> None:
        """As `StageOptimizer.load_unit_state`."""
        self.optimizer.load_unit_state(unit, state)

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        """As `StageOptimizer.unit_state`, always whole."""
        return self.optimizer.unit_state(unit)

    # ---- a step

    def begin_step(self) -> None:
        """Drop what an unfinished step left."""
        self._in_flight.clear()
        self.optimizer.zero_grad()

    def forward(self, chunk: int, microbatch: int, fed: Tensor, labels: Tensor | None = None) -> Tensor:
        """One chunk's forward.

        Args:
            fed: token ids [B, S] int64 or hidden [B, S, C] float32.
            labels: [B, S] int64, for the chunk that holds the head.

        Returns:
            Hidden [B, S, C] float32, or with `labels` the microbatch's share of the mean loss; no graph.
        """
        source = fed.requires_grad_() if fed.is_floating_point() else None
        with compute_precision(self.config.training.precision, self.device):
            if labels is None:
                result = self._chunks[chunk](fed)
            else:
                result = self._chunks[chunk].loss(fed, labels) / (self.config.microbatches * self.ranks)
        self._in_flight[chunk, microbatch] = _InFlight(source, result)
        made: Tensor = result.detach()
        return made

    def backward(self, chunk: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """The backward of what `forward` has run.

        Args:
            gradient: of the hidden states that it returned; None for the loss.

        Returns:
            The gradient of what was fed [B, S, C], None if that was token ids.
        """
        flight = self._in_flight.pop((chunk, microbatch))
        torch.autograd.backward(flight.result, None if gradient is None else gradient.to(flight.result.dtype))
        return None if flight.source is None else flight.source.grad

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
