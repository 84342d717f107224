"""A chunk: contiguous layer units that a pipeline stage runs in one go, as one module."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import sqrt
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from kernels.attention.reach import Documents
from kernels.common import dispatch
from node.config.schema import PLANNED, LoraSection, ModelSection
from node.model.blocks import Block, Embedding, Gpt2Block, Head
from node.model.families.family import Initial, ParameterSpec
from node.model.head_loss import head_loss, is_fused
from node.model.labels import IGNORED
from node.model.llama_block import LlamaBlock
from node.model.lora import DropoutSource, freeze, load_frozen
from node.model.lora_shapes import trained_specs
from node.model.mixture_block import MixtureBlock
from node.model.offload import Offload, Passing
from node.model.past import Slice, slice_loss
from node.model.recompute import recomputed
from node.model.rng import generator
from node.model.shards import shard
from node.model.storage import Storage, head_piece
from node.model.streamed import Streaming
from node.model.tensor_rank import TensorRank
from node.model.units import (
    EMBED,
    HEAD,
    check_model,
    parameter_specs,
    tied_parameter,
    unit_names,
)
from wire.errors import ConfigError, RunError

FAMILY_BLOCKS: dict[str, type[Block]] = {
    block.family.name: block for block in (LlamaBlock, MixtureBlock, Gpt2Block)
}
MOST_THREADS = 16
"""The most threads that draw initial weights. A stage of a large model has hundreds of millions of
weights."""


HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16, PLANNED: torch.bfloat16}
"""The compute dtype of each `[training] precision` other than float32. Until `auto` is decided, estimates
assume bfloat16, which most machines get."""


class Chunk(nn.Module):
    """Layer units in model order. `build_chunk` builds it."""

    def __init__(
        self,
        model: ModelSection,
        units: Sequence[str],
        modules: Sequence[nn.Module],
        lora: LoraSection | None = None,
        dropout: DropoutSource | None = None,
        ranks: int = 1,
    ) -> None:
        """`ranks` is the number of tensor-parallel ranks that share the blocks' weights."""
        super().__init__()
        self.model = model
        self.lora = lora or LoraSection()
        self.dropout = dropout
        """Provides the salt of the adapters' dropout; None without dropout."""
        self.ranks = ranks
        self.units = tuple(units)
        self.layers = nn.ModuleList(modules)
        self.masks_labels = False
        """Labels may be `IGNORED`; such a label has a loss of 0."""
        self.offload: Offload | None = None
        """Moves kept activations to host memory if the blocks' storage says so."""
        self.streaming = Streaming()
        """Fetches blocks' weights and main gradients that are in host memory."""

    def forward(self, x: Tensor, documents: Documents | None = None, place: Slice | None = None) -> Tensor:
        """Run the units in order.

        Args:
            x: token ids [B, S] int64 if the chunk holds "embed", else hidden [B, S, C] float32.
            documents: attention does not cross their borders. They cover the sample's tokens up to the last
                of x.
            place: the slice of the microbatch that x is. Slices must pass in order.

        Returns:
            Logits [B, S, V] if the chunk holds "head", else hidden [B, S, C] float32.
        """
        outputs, _ = self._through(self.layers, x, documents, place)
        return outputs

    def loss(
        self, x: Tensor, labels: Tensor, documents: Documents | None = None, place: Slice | None = None
    ) -> Tensor:
        """The mean cross entropy over all labels of the microbatch, in nats, as a float32 scalar.

        The loss of a slice is the mean over its own labels, times `place.loss_factor`. With `masks_labels`,
        ignored labels count as 0 in the mean, and the step's `label_weight` corrects for them.

        Args:
            x: as for `forward`. The chunk must hold "head".
            labels: [B, S] int64.
            documents, place: as for `forward`.
        """
        head = self.layers[-1]
        x, passing = self._through(self.layers[:-1], x, documents, place)
        of_head = partial(self._head_loss, head, labels)
        weights = list(head.parameters())
        loss = of_head(x) if place is None else slice_loss(x, of_head, place, weights)
        if passing is not None:
            passing.ask_last(loss)
        return loss

    def _head_loss(self, head: nn.Module, labels: Tensor, x: Tensor) -> Tensor:
        tokens = labels.numel()
        if isinstance(head, Head) and (is_fused(x.device) or head_piece(tokens, self.model.vocab) < tokens):
            return head_loss(head.norm(x).flatten(0, 1), head.output, labels.flatten())
        logits_bsv: Tensor = head(x)
        logits = logits_bsv.float().flatten(0, 1)
        if not self.masks_labels:
            return F.cross_entropy(logits, labels.flatten())
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / tokens

    def _through(
        self,
        layers: Iterable[nn.Module],
        x: Tensor,
        documents: Documents | None,
        place: Slice | None = None,
    ) -> tuple[Tensor, Passing | None]:
        grads = torch.is_grad_enabled()
        passing = None if self.offload is None or not grads else Passing(self.offload, x)
        for unit, layer in zip(self.units, layers, strict=False):
            run = layer if isinstance(layer, Head) else partial(layer, documents=documents, place=place)
            storage = layer.storage if isinstance(layer, Block) and grads else Storage()
            if storage.again:
                run = partial(_keeping_input, layer, documents=documents, place=place)
            self.streaming.begin_forward(unit)
            x = run(x) if passing is None else passing.through(layer, run, x, frozenset(storage.offload))
            if grads:
                self.streaming.end_forward(unit, x)
        if passing is not None:
            passing.ask_last(x)
        return x, passing

    def share_loss(self, share: float) -> None:
        """Tell blocks that add loss terms of their own what part of the step's loss a microbatch is."""
        for layer in self.layers:
            if isinstance(layer, MixtureBlock):
                layer.share = share

    def loads(self) -> list[Tensor]:
        """The number of tokens that each expert got, int64 [E], for every mixture that has computed any."""
        blocks = (layer for layer in self.layers if isinstance(layer, MixtureBlock))
        return [block.load for block in blocks if block.load is not None]

    def unit_parameters(self, unit: str) -> dict[str, nn.Parameter]:
        """The unit's trained parameters by name, in the order of `node.model.lora_shapes.trained_specs`."""
        named = dict(self.layers[self.units.index(unit)].named_parameters())
        return {spec.name: named[spec.name] for spec in self.trained_specs(unit)}

    def trained_specs(self, unit: str) -> tuple[ParameterSpec, ...]:
        """The parameters of a unit that training changes."""
        return trained_specs(self.model, self.lora, unit)

    @torch.no_grad()
    def load_frozen(self, unit: str, weights: Mapping[str, Tensor]) -> None:
        """Replace a unit's frozen weights, or this rank's shards of them, by those of a checkpoint.

        Args:
            weights: float32 tensors by name.

        Raises:
            RunError: a weight is missing, unknown or of another shape.
        """
        specs = parameter_specs(self.model, unit)
        expected = {spec.name: spec.shard_shape(self.ranks) for spec in specs}
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        if self.lora.rank == 0 or shapes != expected:
            raise RunError(f"weights of unit {unit} do not fit this run's model; start from its checkpoint")
        self.streaming.replace_frozen(unit)
        load_frozen(self.layers[self.units.index(unit)], weights)

    def tied_parameter(self, unit: str) -> nn.Parameter | None:
        """The unit's copy of the tied weight, or None."""
        name = tied_parameter(self.model, unit)
        return None if name is None else self.unit_parameters(unit).get(name)

    def named_units(self) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
        """Each unit with its trained parameters by name, in model order."""
        for unit in self.units:
            yield unit, self.unit_parameters(unit)


def _keeping_input(layer: nn.Module, x: Tensor, documents: Documents | None, place: Slice | None) -> Tensor:
    """`layer(x, documents, place)`, run again in backward. Only x is kept, and a slice's keys and values."""
    # The parameters as they are now: a captured pass replaces them while it goes forward.
    parameters: dict[str, Tensor] = dict(layer.named_parameters())

    def run(x: Tensor) -> Tensor:
        return cast(Tensor, functional_call(layer, parameters, (x, documents, place)))

    # Nothing in a block draws from torch's generators.
    return recomputed(run, x)


def build_chunk(
    model: ModelSection,
    units: Sequence[str],
    seed: int,
    device: torch.device,
    weights_in: torch.dtype = torch.float32,
    storage: Storage | Mapping[str, Storage] | None = None,
    rank: TensorRank | None = None,
    lora: LoraSection | None = None,
    built: Callable[[str, nn.Module], None] | None = None,
    *,
    is_drawn: bool = True,
) -> Chunk:
    """The chunk of these units with its initial weights: matrices in `weights_in`, vectors in float32.

    Each weight is a function of (seed, unit, parameter name), so every split builds the same bits.

    Args:
        storage: what blocks keep for backward, for all of them or by unit. By default nothing is packed.
        rank: build this tensor-parallel rank's shards.
        lora: freeze the weights and add adapters, whose parameters are in `weights_in`.
        built: called with each unit once it is on the device.
        is_drawn: if False, weights other than adapters are zeros until they are loaded.

    Raises:
        ConfigError: the model does not have these units, or they are not contiguous and in order.
    """
    check_model(model)
    names = unit_names(model)
    wanted = tuple(units)
    first = names.index(wanted[0]) if wanted and wanted[0] in names else 0
    if not wanted or names[first : first + len(wanted)] != wanted:
        raise ConfigError(
            f"a chunk of units {', '.join(wanted) or '(none)'} is not a contiguous run of embed, the "
            f"{model.layers} blocks and head, in order"
        )
    tables = FAMILY_BLOCKS[model.family].tables(model, device)
    rank, lora = rank or TensorRank(), lora or LoraSection()
    source = DropoutSource(device)
    modules: list[nn.Module] = []
    drawn = _draw_weights(model, wanted, seed) if is_drawn else _zeros(model, wanted)
    for unit in wanted:
        # On the meta device torch allocates nothing and draws no random numbers.
        with torch.device("meta"):
            own = storage.get(unit) if isinstance(storage, Mapping) else storage
            module = _module(model, unit, tables, own or Storage(), rank)
        # Cloned into torch's own 64-byte aligned memory, because the bits of a product may depend on
        # alignment.
        place = torch.device("cpu") if lora.rank else device
        weights = {
            spec.name: shard(unit, spec, torch.from_numpy(next(drawn)), rank.index, rank.count)
            .clone()
            .to(place, weights_in if len(spec.shape) >= 2 and lora.rank == 0 else torch.float32)
            for spec in parameter_specs(model, unit)
        }
        module.load_state_dict(weights, strict=True, assign=True)
        if lora.rank:
            adapters = {
                spec.name: shard(
                    unit,
                    spec,
                    torch.from_numpy(initial_weight(model, unit, spec, seed)),
                    rank.index,
                    rank.count,
                )
                .clone()
                .to(device, weights_in)
                for spec in trained_specs(model, lora, unit)
            }
            freeze(module, unit, model, lora, adapters, source, rank)
            if isinstance(module, Block):
                module.fuses = False  # a fused half calls no projection, so it would skip the adapters
        elif isinstance(module, Block) and dispatch.has_kernels(device) and weights_in != torch.float32:
            module.lay_weights_together()
        if built is not None:
            built(unit, module)
        modules.append(module)
    return Chunk(model, wanted, modules, lora, source if lora.dropout else None, rank.count)


def _zeros(model: ModelSection, units: Sequence[str]) -> Iterator[np.ndarray]:
    for unit in units:
        for spec in parameter_specs(model, unit):
            yield np.zeros(spec.shape, dtype=np.float32)


def _draw_weights(model: ModelSection, units: Sequence[str], seed: int) -> Iterator[np.ndarray]:
    """Yield every initial weight of these units, in order.

    Threads draw ahead, at most as many weights as there are threads. Each weight has its own generator.
    """
    places = [(unit, spec) for unit in units for spec in parameter_specs(model, unit)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(cores, MOST_THREADS)
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        drawn: deque[Future[np.ndarray]] = deque()
        for unit, spec in places:
            if len(drawn) > threads:
                yield drawn.popleft().result()
            drawn.append(pool.submit(initial_weight, model, unit, spec, seed))
        while drawn:
            yield drawn.popleft().result()


def initial_weight(model: ModelSection, unit: str, spec: ParameterSpec, seed: int) -> np.ndarray:
    """A parameter's initial value, a float32 array of `spec.shape`."""
    if spec.initial is Initial.ONES:
        return np.ones(spec.shape, dtype=np.float32)
    if spec.initial is Initial.ZEROS:
        return np.zeros(spec.shape, dtype=np.float32)
    # Both copies of a tied weight use the embedding's generator.
    source, name = (EMBED, "tokens.weight") if tied_parameter(model, unit) == spec.name else (unit, spec.name)
    std = model.init_std
    place = generator(seed, layer=source, purpose=f"weight {name}")
    if spec.initial is Initial.UNIFORM:
        return place.uniform(-1.0, 1.0, spec.shape).astype(np.float32) / np.float32(sqrt(spec.shape[1]))
    if spec.initial is Initial.RESIDUAL:
        std /= sqrt(2 * model.layers)
    draws = place.standard_normal(spec.shape, dtype=np.float32)
    draws *= np.float32(std)
    return draws


def compute_precision(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward passes: autocast for `bfloat16` and `float16`, nothing for `float32`.

    Raises:
        ConfigError: the precision is unknown.
    """
    if precision == "float32":
        return nullcontext()
    if precision in HALVES:
        return torch.autocast(device.type, dtype=HALVES[precision])
    known = ", ".join(HALVES)
    raise ConfigError(f"[training] precision is {precision!r}; it must be float32, or one of {known}")


def weight_dtype(name: str) -> torch.dtype:
    """The dtype named by `[training] weights`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _module(model: ModelSection, unit: str, tables: object, storage: Storage, rank: TensorRank) -> nn.Module:
    if unit == EMBED:
        return Embedding(model, rank)
    if unit == HEAD:
        return Head(model)
    return FAMILY_BLOCKS[model.family](model, int(unit.partition(".")[2]), tables, storage, rank)
