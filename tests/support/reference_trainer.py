"""The reference trainer: the unsplit model in one process, which a pipelined run must reproduce.

It is plain autograd over the same units, microbatches, schedule, clipping and optimizer as a run. Codecs may
be put at chunk boundaries, as in a run: activations and their gradients are encoded and decoded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.attention.reach import Documents
from node.config.schema import RunConfig
from node.data.samples import Samples
from node.data.shards import TrainingData
from node.model.chunk import build_chunk, compute_precision, weight_dtype
from node.model.labels import label_weight
from node.model.units import EMBED, HEAD, unit_names
from node.schedule.gradient_groups import parts_of_group
from node.state.manifest import weights_sha256
from node.state.serialization import load_unit
from node.state.snapshot import read_manifest
from node.training.gradients import gradient_of
from node.training.group_sums import Gradient
from node.training.local_steps import LocalSteps
from node.training.loss_scale import SKIPPED, loss_scales
from node.training.optimizer import StageOptimizer, sum_tied_gradients
from node.training.overflow import Overflow
from node.training.schedule import clip_coefficient, global_norm, learning_rate
from node.tuning.memory import stage_storages
from tests.support.device_sums import model_sums
from tests.support.snapshots import unit_weights_sha256
from wire.errors import DataError
from wire.spec import Direction, TensorKey

Boundary = Callable[[Tensor, TensorKey], Tensor]
"""Maps a tensor [B, S, C] as a link does; the key names the boundary and the direction."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step as it was taken."""

    loss: float
    """Mean over the step's tokens, in nats, before the step."""
    grad_norm: float
    """Global, before clipping; infinite if the step is skipped."""
    lr: float


class ReferenceTrainer:
    """Trains `config.model` step by step; `step` counts the optimizer steps taken."""

    def __init__(
        self,
        config: RunConfig,
        corpus: TrainingData,
        *,
        groups: Sequence[Sequence[str]] | None = None,
        boundary: Boundary | None = None,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            groups: units between boundaries, as from `split_units`; the whole model by default.
            boundary: applied between groups, both ways; None leaves tensors as they are.
        """
        self.config = config
        self.corpus = corpus
        self.device = device or torch.device("cpu")
        self._boundary = boundary
        # Global chunk j is on stage j mod stages; a whole model is on one.
        storages = stage_storages(config, config.pipeline.stages if groups else 1)
        self.chunks = [
            build_chunk(
                config.model,
                units,
                config.run.seed,
                self.device,
                weight_dtype(config.training.weights),
                storages[index % len(storages)],
                lora=config.lora,
            )
            for index, units in enumerate(groups or (unit_names(config.model),))
        ]
        self.chunks[-1].masks_labels = config.data.masks_labels
        for chunk in self.chunks:
            chunk.share_loss(1 / config.microbatches)
        self.optimizer = StageOptimizer(self.chunks, config.training, config.run.seed)
        self._local = LocalSteps(config, self.optimizer)
        self.scales = loss_scales(config.training)
        """Of the loss, in float16."""
        self._overflow = Overflow()
        self.step = 0

    def train(self, steps: int) -> list[Step]:
        """Take this many steps."""
        return [self.train_step() for _ in range(steps)]

    def train_step(self) -> Step:
        """Take one step: gradients of all microbatches, then the optimizer."""
        loss = self.accumulate()
        norms = self._overflow.told(dict(enumerate(self.optimizer.squared_norms().values())))
        factor = 1.0 if self.scales is None else self.scales.at(self.step).factor
        grad_norm = global_norm(norm / factor**2 for norm in norms.values())
        lr = learning_rate(self.step, self.config.training, self.config.run.steps)
        skipped = self.scales is not None and self.scales.overflows(self.step) and not isfinite(grad_norm)
        if self.config.is_round(self.step):
            self._local.apply(self.step)
        elif skipped:
            self.optimizer.apply(lr, SKIPPED)
        else:
            self.optimizer.apply(lr, clip_coefficient(grad_norm, self.config.training.clip) / factor)
        if self.scales is not None:
            self.scales.committed(self.step, skipped=skipped)
        self.step += 1
        return Step(loss=loss, grad_norm=grad_norm, lr=lr)

    def accumulate(self) -> float:
        """Leave the next step's gradients, or the groups' mean change in a round, beside the weights; returns
        its mean loss."""
        config, count = self.config, self.config.pipeline.groups
        is_round, parts = config.is_round(self.step), config.parts_of(self.step)
        shares: list[list[Tensor]] = [[] for _ in range(count)]
        sums = None
        if count > 1:
            sums = model_sums(config, self.optimizer.units, self.device, of_round=is_round)
        self.optimizer.zero_grad()
        labels = self.corpus.labels(self.step)
        factor = 1.0 if self.scales is None else self.scales.at(self.step).factor
        weight, self._overflow = factor * label_weight(labels), Overflow(factor)
        batches = list(
            zip(
                np.split(self.corpus.batch(self.step)[:, :-1], config.microbatches),
                np.split(labels, config.microbatches),
                np.split(self.corpus.documents(self.step), config.microbatches),
                strict=True,
            )
        )
        for group in range(count):
            if is_round:
                self._local.begin_group()
            for part in parts_of_group(config, group, parts):
                for index in part:
                    loss, crossings = self._forward(*batches[index], index)
                    # Each microbatch has equally many positions, so the step's mean is the mean of means.
                    share = (loss * weight if config.weighs_loss else loss) / config.microbatches
                    self._backward(share, crossings, index)
                    shares[group].append(share.detach())
                if is_round:
                    self._tie()
                    self._local.step(self.step)
            if sums is not None:
                sums.group_done(group, self._local.changes() if is_round else self._take_gradients())
        if is_round:
            self._local.end()
        for unit, values in sums.finish() if sums is not None else ():
            if is_round:
                self._local.put(unit, values)
            else:
                self.optimizer.put_gradients(unit, values)
        if not is_round:
            self._tie()
        total = 0.0
        for of_group in shares:
            total += float(torch.stack(of_group).double().sum()) / factor
        return total

    def _take_gradients(self) -> dict[str, dict[str, Gradient]]:
        taken = {unit: self.optimizer.take_gradients(unit) for unit in self.optimizer.units}
        self._overflow.clear(taken.values())
        return taken

    @torch.no_grad()
    def start_from(self, weights: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Replace the weights by a checkpoint's, as `node.state.start.read_units` returns them.

        With adapters these are the frozen weights.

        Raises:
            RunError: frozen weights do not fit this model.
        """
        for chunk in self.chunks:
            for unit, parameters in chunk.named_units():
                if self.config.lora.rank:
                    chunk.load_frozen(unit, {k: torch.from_numpy(v) for k, v in weights[unit].items()})
                    continue
                for name, parameter in parameters.items():
                    parameter.copy_(torch.from_numpy(weights[unit][name]))
        self.optimizer.weights_changed()

    def restore(self, directory: Path) -> None:
        """Go on from a complete snapshot, of any split.

        Raises:
            RunError: the snapshot is incomplete, damaged or of another model.
        """
        for unit in self.optimizer.units:
            self.optimizer.load_unit_state(unit, load_unit(directory, unit))
        manifest = read_manifest(directory)
        self.step = manifest.step
        if manifest.loss_scale is not None:
            self.scales = loss_scales(self.config.training, known=(self.step, manifest.loss_scale))

    @torch.no_grad()
    def validation_loss(self, windows: np.ndarray | Samples) -> float:
        """Mean cross entropy in nats over samples, or windows [n, sequence + 1] of one document each,
        boundaries included.

        Raises:
            DataError: there are no windows.
        """
        samples = windows if isinstance(windows, Samples) else Samples.of(windows)
        if len(samples) == 0:
            raise DataError("the text is too short to hold any out for validation; give more text")
        size = self.config.training.microbatch
        total = 0.0
        for index, first in enumerate(range(0, len(samples), size)):
            rows = samples[first : first + size]
            loss, _ = self._forward(rows.windows[:, :-1], rows.labels, rows.documents, index)
            total += loss.item() * len(rows)
        return total / len(samples) * samples.label_weight

    def weights_sha256(self) -> str:
        """The same hash as a snapshot's manifest gives these weights."""
        return weights_sha256(
            unit_weights_sha256(
                {name: value.detach().float().cpu().numpy() for name, value in parameters.items()}
            )
            for chunk in self.chunks
            for _, parameters in chunk.named_units()
        )

    def _forward(
        self, inputs: np.ndarray, labels: np.ndarray, starts: np.ndarray, microbatch: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Loss of a microbatch, and at each boundary what was sent and what arrived."""
        self.optimizer.begin_forward(microbatch)
        x, wanted = (torch.from_numpy(ids.astype(np.int64)).to(self.device) for ids in (inputs, labels))
        documents = None
        if self.config.data.separate_documents:
            documents = Documents.of(torch.from_numpy(starts), self.device)
        crossings = []
        precision = self.config.training.precision
        for index, chunk in enumerate(self.chunks[:-1]):
            # Boundaries stay outside, as codecs do in a run: their arithmetic is not the model's.
            with compute_precision(precision, self.device):
                sent = chunk(x, documents)
            x = self._cross(sent.detach(), microbatch, index, Direction.ACTIVATION).requires_grad_()
            crossings.append((sent, x))
        with compute_precision(precision, self.device):
            return self.chunks[-1].loss(x, wanted, documents), crossings

    def _backward(self, loss: Tensor, crossings: list[tuple[Tensor, Tensor]], microbatch: int) -> None:
        self.optimizer.begin_backward(microbatch)
        torch.autograd.backward(loss)
        for index, (sent, arrived) in reversed(list(enumerate(crossings))):
            made = self._overflow.cleared(gradient_of(arrived))
            gradient = self._cross(made, microbatch, index, Direction.GRADIENT)
            torch.autograd.backward(sent, gradient)

    def _cross(self, tensor: Tensor, microbatch: int, index: int, direction: Direction) -> Tensor:
        if self._boundary is None:
            return tensor
        return self._boundary(tensor, TensorKey(0, self.step, microbatch, index, direction))

    def _tie(self) -> None:
        embed = self.chunks[0].tied_parameter(EMBED)
        head = self.chunks[-1].tied_parameter(HEAD)
        if embed is not None and head is not None:
            gradients = self.optimizer.gradients
            total = sum_tied_gradients(gradients.get(head), gradients.get(embed))
            gradients.put(embed, total)
            gradients.put(head, total)
