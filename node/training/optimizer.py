"""AdamW over the layer units that one process holds.

Everything is kept and reported by unit, so that norms sum to the same bits and snapshots restore on any
split. Moments are float32, or e4m3 for matrices (`[training] moments`);
`node.training.gradients` keeps gradients. Snapshots hold weights as float32, which holds bfloat16 exactly.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_of

from kernels.common import dispatch
from kernels.fp8.ops import adamw_step
from kernels.fp8.reference import AdamWStep, Fp8Gradient, Moment
from kernels.fp8.rows import Coded
from node.config.schema import TrainingSection
from node.model.blocks import Block
from node.model.chunk import Chunk
from node.model.host_memory import HostMemory
from node.model.lora import DropoutSource
from node.model.products import AddProduct
from node.model.rng import salt
from node.model.shard_shapes import pieces
from node.model.streamed import Streaming
from node.model.tensor_rank import TensorRank
from node.model.units import HEAD, tied_parameter
from node.training.gradients import MOST_TO_NEAREST, Fp8Gradients, Gradients, PlainGradients, norms
from node.training.host_moments import HostMoments, step_piece
from node.training.loaded_state import (
    MOMENTS,
    OUTER,
    PARAMETER,
    POWER,
    SCALE,
    STEP,
    check_loaded,
    expected_state,
)
from node.training.loss_scale import SKIPPED
from node.training.schedule import clip_coefficient
from wire.errors import NonFiniteError


class StageOptimizer:
    """Holds the main gradients and AdamW's state for the units of some chunks."""

    def __init__(
        self,
        chunks: Iterable[Chunk],
        training: TrainingSection,
        seed: int = 0,
        rank: TensorRank | None = None,
        *,
        gradients_in_place: bool = False,
        host: HostMemory | None = None,
        streaming: Streaming | None = None,
        gradients_away: Collection[str] = (),
        codes_away: Collection[str] = (),
    ) -> None:
        """
        Args:
            seed: the run's, for stochastic rounding of bfloat16 weights and of gradients in e4m3.
            rank: that of the chunks' shards.
            gradients_in_place: gradients never move in memory.
            host: keeps the matrices' moments there; the step is the same bits.
            streaming: the chunks', whose weights may be in host memory.
            gradients_away: blocks the main gradients of whose matrices begin in `host`,
            codes_away: and blocks whose codes for products in FP8 do. These, weights and gradients may be
                there only with the moments.
        """
        self._units: dict[str, dict[str, nn.Parameter]] = {}
        # Both copies of a tied weight have the same gradient; the global norm counts the embedding's.
        self._counted: dict[str, list[nn.Parameter]] = {}
        self._tied: set[nn.Parameter] = set()
        self._rank = rank or TensorRank()
        self._dropouts: list[DropoutSource] = []
        self._sharded: set[nn.Parameter] = set()
        blocks_by_unit: dict[str, Block] = {}
        for chunk in chunks:
            if chunk.dropout is not None:
                self._dropouts.append(chunk.dropout)
            if chunk.lora.rank == 0:
                named = zip(chunk.units, chunk.layers, strict=True)
                blocks_by_unit |= {unit: layer for unit, layer in named if isinstance(layer, Block)}
            for unit, parameters in chunk.named_units():
                copy = tied_parameter(chunk.model, unit)
                self._units[unit] = parameters
                self._tied.update(value for name, value in parameters.items() if name == copy)
                self._sharded.update(
                    parameters[spec.name]
                    for spec in chunk.trained_specs(unit)
                    if self._rank.count > 1 and pieces(unit, spec) is not None
                )
                counted = copy if unit == HEAD else None
                self._counted[unit] = [value for name, value in parameters.items() if name != counted]
        everything = [parameter for unit in self._units.values() for parameter in unit.values()]
        matrices = [parameter for parameter in everything if parameter.ndim >= 2]
        vectors = [parameter for parameter in everything if parameter.ndim < 2]
        self._training = training
        self._seed = seed
        self.streaming = streaming or Streaming()
        self._in_blocks = {
            unit: [parameter for parameter in self._units[unit].values() if parameter.ndim >= 2]
            for unit in blocks_by_unit
        }
        """Matrices of blocks by unit, in model order."""
        self.gradients: Gradients
        if training.gradients == "fp8":
            salts = self._gradient_salts() if self._rounds_stochastically else None
            away = {one for unit in gradients_away for one in self._in_blocks[unit]}
            self.gradients = Fp8Gradients(everything, in_place=gradients_in_place, salts=salts, away=away)
        else:
            self.gradients = PlainGradients(everything, in_place=gradients_in_place)
        if training.precision != "float32" and any(dispatch.has_kernels(p.device.type) for p in everything):
            for block in blocks_by_unit.values():
                block.add_weight_gradients(self._adding_to)
        for block in blocks_by_unit.values():
            block.fixed_order = training.deterministic
            if training.weight_gradients == "fp8":
                block.code_weight_gradients()
        self._coded = blocks_by_unit if training.compute == "fp8" else {}
        """Blocks whose products are in FP8."""
        self.streaming.coded = bool(self._coded)
        if host is not None:
            self.move_gradients(host, gradients_away, away=training.gradients == "fp8")
            self.streaming.move_codes(host, codes_away, self._coded)
        self.weights_changed()
        self._steps = dict.fromkeys(self._units, 0)
        self._vectors = _AdamW(vectors, training)
        self._place_moments(matrices, host)

    def _place_moments(self, matrices: Sequence[nn.Parameter], host: HostMemory | None) -> None:
        """Moments of matrices that begin at 0, on the device or in `host`."""
        packed = self._training.moments == "fp8"
        self._packed: dict[nn.Parameter, tuple[Moment, Moment]] = {}
        self._on_host = None if host is None else HostMoments(host, matrices, packed=packed)
        there = matrices if host is None else ()
        for parameter in there if packed else ():
            mean, square = (Moment.zeros(parameter.numel(), parameter.device) for _ in MOMENTS)
            self._packed[parameter] = mean, square
        unpacked = [parameter for parameter in there if parameter not in self._packed]
        # Two, because matrices whose gradients are in e4m3 step one at a time.
        self._matrices = _AdamW(unpacked, self._training)
        self._moments = {**self._matrices.state, **self._vectors.state}
        self.outer: dict[nn.Parameter, Tensor] = {}
        """The momentum of all parameters, float32 on the CPU; empty before a run's first round has ended."""

    @torch.no_grad()
    def move_moments(self, host: HostMemory | None) -> None:
        """Move the matrices' moments to `host`, or back to the device if None, between two steps."""
        if (host is None) == (self._on_host is None):
            return
        before, matrices = self._on_host, [one for one in self.parameters if one.ndim >= 2]
        kept = {
            one: before.whole(one) if before is not None else list(self._state_parts(one, "").values())
            for one in matrices
        }
        self._place_moments(matrices, host)
        steps = {one: self._steps[unit] for unit, named in self._units.items() for one in named.values()}
        for parameter, parts in kept.items():
            if self._on_host is not None:
                self._on_host.load(parameter, parts)
                continue
            for part, value in zip(self._state_parts(parameter, "").values(), parts, strict=True):
                part.copy_(value.view(part.shape))
            if parameter in self._moments:
                self._moments[parameter][STEP].fill_(steps[parameter])

    def move_weights(self, host: HostMemory, blocks: Collection[str]) -> None:
        """Have the weights of these blocks' matrices in `host`, and those of others on the device."""
        self.streaming.move_weights(host, blocks, self._in_blocks)

    def move_codes(self, host: HostMemory, blocks: Collection[str]) -> None:
        """As `move_weights`, of their codes for products in FP8."""
        self.streaming.move_codes(host, blocks, self._coded)

    def move_gradients(self, host: HostMemory, blocks: Collection[str], *, away: bool = False) -> None:
        """As `move_weights`, of their main gradients. `away`: these have no memory yet."""
        self.streaming.move_gradients(host, blocks, self._in_blocks, self.gradients, away=away)

    def _adding_to(self, weights: Sequence[nn.Parameter]) -> AddProduct:
        gradients = self.gradients

        def add(numbers: Sequence[int], grads: Tensor | Coded, rows: Tensor | Coded) -> None:
            gradients.add_product([weights[number] for number in numbers], grads, rows)

        return add

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(self._units)

    @property
    def named(self) -> Mapping[str, Mapping[str, nn.Parameter]]:
        """Parameters by layer unit and name."""
        return self._units

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All, in model order."""
        return tuple(parameter for unit in self._units.values() for parameter in unit.values())

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether other tensor-parallel ranks hold other parts of it."""
        return parameter in self._sharded

    @property
    def moment_bytes(self) -> int:
        """Memory that the moments take, without those in host memory."""
        packed = [moment.nbytes for pair in self._packed.values() for moment in pair]
        plain: list[int] = [state[moment].nbytes for state in self._moments.values() for moment in MOMENTS]
        return sum(packed) + sum(plain)

    def zero_grad(self) -> None:
        """Drop all gradients: before a step, and when one is aborted."""
        self.streaming.begin_passes()
        self.gradients.clear()

    def weights_changed(self) -> None:
        """Code the weights of products in FP8 again."""
        if self.streaming.codes is not None:
            self.streaming.codes.blank()
        for unit, block in self._coded.items():
            self.streaming.code(unit, block)

    def begin_forward(self, microbatch: int) -> None:
        """The next forward is this microbatch's: adapters drop elements by its salt, on every rank."""
        if self._dropouts:
            purpose = f"dropout of microbatch {microbatch}"
            drawn = salt(self._seed, step=self._next_step, layer="", purpose=purpose)
            for source in self._dropouts:
                source.begin(drawn)

    @property
    def _next_step(self) -> int:
        """The step that `apply` will take. All units are at the same; another attempt has the same number."""
        return 1 + next(iter(self._steps.values()), 0)

    def begin_backward(self, microbatch: int, rank: int = 0) -> None:
        """The next backward belongs to this microbatch.

        Args:
            rank: this process among those of its node that share the microbatch. Each rounds by other random
                bits, so that their errors do not add up.
        """
        if self._rounds_stochastically:
            purpose = f"gradients of microbatch {microbatch} on rank {rank}"
            self.gradients.begin_microbatch(salt(self._seed, step=self._next_step, layer="", purpose=purpose))

    @property
    def _rounds_stochastically(self) -> bool:
        training = self._training
        many = training.global_batch // training.microbatch > MOST_TO_NEAREST
        return training.gradients == "fp8" and many

    def _gradient_salts(self) -> dict[nn.Parameter, int]:
        """By unit and name: the same on any split."""
        return {
            parameter: salt(self._seed, step=0, layer=unit, purpose=f"gradients of {name}")
            for unit, parameters in self._units.items()
            for name, parameter in parameters.items()
        }

    def squared_norms(self) -> dict[str, float]:
        """Squared gradient norm of each unit, in float64, a tied weight counted once (in "embed").

        Summed in model order over all units, they give the same bits whatever the split. Values may be
        infinite or NaN; the coordinator refuses such a step.

        Raises:
            RunError: a parameter has no gradient.
        """
        return self.sum_squared_norms([self.parameter_squared_norms()])

    def parameter_squared_norms(self) -> list[float]:
        """Squared gradient norm of each counted parameter, or of this rank's shard of it, in model order."""
        counted = [(unit, parameter) for unit, named in self._counted.items() for parameter in named]
        return [_sum_of_squares(pieces) for pieces in self._norms_of(counted)]

    def _norms_of(self, places: Iterable[tuple[str, nn.Parameter]]) -> list[list[float]]:
        """Norms of the pieces of each parameter's gradient, as `norms` gives them, by unit and parameter."""
        made = []
        for unit, named in groupby(places, key=itemgetter(0)):
            self.streaming.use_gradients(unit)
            made += norms([self.gradients.stored(parameter) for _, parameter in named])
        if not made:
            return []
        # One wait for the device, for all of them.
        found = iter(torch.stack([norm for pieces in made for norm in pieces]).tolist())
        return [[next(found) for _ in pieces] for pieces in made]

    def sum_squared_norms(self, ranks: Sequence[Sequence[float]]) -> dict[str, float]:
        """Units' squared norms from `parameter_squared_norms` of all tensor-parallel ranks, in their order.

        A replicated parameter's gradient is the same on all and is counted once.
        """
        squares: dict[str, float] = {}
        each = zip(*ranks, strict=True)
        for unit, parameters in self._counted.items():
            total = 0.0
            for parameter in parameters:
                shards = next(each)
                for norm in shards if parameter in self._sharded else shards[:1]:
                    total += norm
            squares[unit] = total
        return squares

    def take_gradients(self, unit: str) -> dict[str, Tensor | Fp8Gradient]:
        """A unit's gradients by parameter, for the caller to keep; they begin again at 0.

        Raises RunError if a parameter has none.
        """
        with torch.no_grad():
            self.streaming.use_gradients(unit, changed=True)
            return {name: self.gradients.take(one) for name, one in self._units[unit].items()}

    def put_gradients(self, unit: str, values: Mapping[str, Tensor]) -> None:
        """Replace all of a unit's gradients by copies of these, float32 [elements] by parameter."""
        with torch.no_grad():
            self.streaming.use_gradients(unit, changed=True)
            for name, parameter in self._units[unit].items():
                self.gradients.put(parameter, values[name].view(parameter.shape))

    def apply(self, lr: float, clip_coefficient: float) -> None:
        """Scale gradients by the global clip coefficient, take one AdamW step, drop the gradients.

        A step that is `SKIPPED` only drops them: AdamW does not count it.
        """
        if clip_coefficient == SKIPPED:
            self.zero_grad()
            return
        self._adamw(lr, lambda _: clip_coefficient)

    def local_step(self, lr: float, taken: int, scale: float) -> None:
        """Take one AdamW step of a round; drop the gradients.

        No stage waits for others: each parameter's gradient is clipped by its own norm.

        Args:
            taken: local steps since the round began.
            scale: of gradients.

        Raises:
            NonFiniteError: a gradient is not finite. Nothing has changed.
        """
        coefficients: dict[nn.Parameter, float] = {}
        places = [(unit, name, one) for unit, named in self._units.items() for name, one in named.items()]
        found = self._norms_of((unit, parameter) for unit, _, parameter in places)
        for (unit, name, parameter), pieces_of in zip(places, found, strict=True):
            norm = scale * math.sqrt(_sum_of_squares(pieces_of))
            if not math.isfinite(norm):
                raise NonFiniteError(f"the gradient of {name} of {unit} in local step {taken + 1}")
            coefficients[parameter] = scale * clip_coefficient(norm, self._training.clip)
        self._adamw(lr, coefficients.__getitem__)

    @property
    def steps_taken(self) -> dict[str, int]:
        """AdamW's count of steps, by unit. Rounds set it back."""
        return dict(self._steps)

    @steps_taken.setter
    def steps_taken(self, steps: Mapping[str, int]) -> None:
        self._steps.update(steps)
        for unit, parameters in self._units.items():
            for parameter in parameters.values():
                if parameter in self._moments:
                    self._moments[parameter][STEP].fill_(self._steps[unit])

    def moments_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """Both moments, float32 of the parameter's shape; never of those in e4m3. The optimizer's own, or
        copies on the CPU of those in host memory."""
        if self._on_host is not None and parameter in self._on_host:
            return self._on_host.whole(parameter)
        return [self._moments[parameter][moment] for moment in MOMENTS]

    @torch.no_grad()
    def put_moments(self, parameter: nn.Parameter, mean: Tensor, square: Tensor) -> None:
        """Replace what `moments_of` gives by copies of these."""
        if self._on_host is not None and parameter in self._on_host:
            self._on_host.load(parameter, [mean, square])
            return
        for moment, value in zip(MOMENTS, (mean, square), strict=True):
            self._moments[parameter][moment].copy_(value, non_blocking=True)

    @torch.no_grad()
    def _adamw(self, lr: float, scale_of: Callable[[nn.Parameter], float]) -> None:
        """One step with gradients times `scale_of` their parameter."""
        for unit, parameters in self._units.items():
            self._steps[unit] += 1
            for name, parameter in parameters.items():
                if parameter in self._packed:
                    moments = self._packed[parameter]
                    step = self._adamw_step(unit, name, parameter, lr, scale_of(parameter))
                    adamw_step(parameter, self.gradients.stored(parameter), *moments, step)
        if self._on_host is not None:
            self._apply_streamed(self._on_host, lr, scale_of)
        for adamw, decay in ((self._matrices, self._training.weight_decay), (self._vectors, 0.0)):
            kept: dict[nn.Parameter, Tensor] = {}
            for parameter in adamw.state:
                gradient = self.gradients.get(parameter)
                if parameter.grad is None:
                    # It was unpacked for this step alone.
                    adamw.step({parameter: gradient.mul_(scale_of(parameter))}, lr, decay)
                else:
                    kept[parameter] = gradient
            if kept:
                torch._foreach_mul_(list(kept.values()), [scale_of(parameter) for parameter in kept])
            adamw.step(kept, lr, decay)
        self.weights_changed()
        self.zero_grad()

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        """A copy of a unit's whole state on the CPU, so that training may continue meanwhile.

        Keys: "parameter.NAME" (float32) and "step" (int64 scalar); for moments in float32 "exp_avg.NAME" and
        "exp_avg_sq.NAME", for those in e4m3 the codes under these names (uint8 [elements]) and
        "exp_avg_scale.NAME" (float32 [blocks]), "exp_avg_power.NAME" (uint8 [blocks]), likewise of the other.
        After a round "outer.NAME" (float32) too.
        """
        state: dict[str, Tensor] = {STEP: torch.tensor(self._steps[unit], dtype=torch.int64)}
        self.streaming.use_weights(unit)
        for name, parameter in self._units[unit].items():
            state[f"{PARAMETER}.{name}"] = copy_to_cpu(parameter.float())
            parts = self._state_parts(parameter, name)
            if self._on_host is not None and parameter in self._on_host:
                found = dict(zip(parts, self._on_host.whole(parameter), strict=True))
            else:
                found = {key: copy_to_cpu(part) for key, part in parts.items()}
            state |= {key: part.float() if SCALE in key else part for key, part in found.items()}
            if parameter in self.outer:
                state[f"{OUTER}.{name}"] = copy_to_cpu(self.outer[parameter])
        return state

    @torch.no_grad()
    def load_unit_state(self, unit: str, tensors: Mapping[str, Tensor]) -> None:
        """Load what `unit_state` returned; nothing changes unless all of it fits.

        Raises:
            RunError: a tensor is missing, unknown, or of another shape or dtype.
        """
        after_round = any(key.startswith(f"{OUTER}.") for key in tensors)
        packed = self._training.moments == "fp8"
        expected = expected_state(self._units[unit], packed=packed, after_round=after_round)
        check_loaded(unit, expected, tensors)
        self._steps[unit] = int(tensors[STEP].item())
        self.streaming.use_weights(unit, changed=True)
        for name, parameter in self._units[unit].items():
            parameter.copy_(tensors[f"{PARAMETER}.{name}"])
            self.outer.pop(parameter, None)
            if after_round:
                self.outer[parameter] = copy_to_cpu(tensors[f"{OUTER}.{name}"])
            parts = self._state_parts(parameter, name)
            if self._on_host is not None and parameter in self._on_host:
                self._on_host.load(parameter, [tensors[key] for key in parts])
                continue
            for key, part in parts.items():
                part.copy_(tensors[key])
            if parameter in self._moments:
                self._moments[parameter][STEP].fill_(self._steps[unit])
        if unit in self._coded:
            self.streaming.code(unit, self._coded[unit])

    def _state_parts(self, parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
        """The tensors of a parameter's moments by their keys in a unit's state; empty ones for those in host
        memory."""
        if self._on_host is not None and parameter in self._on_host:
            empty = torch.empty(0)
            kinds = ("", SCALE, POWER) if self._training.moments == "fp8" else ("",)
            return {f"{moment}{kind}.{name}": empty for moment in MOMENTS for kind in kinds}
        if parameter not in self._packed:
            return {f"{moment}.{name}": self._moments[parameter][moment] for moment in MOMENTS}
        parts = {}
        for moment, packed in zip(MOMENTS, self._packed[parameter], strict=True):
            parts[f"{moment}.{name}"] = packed.codes
            parts[f"{moment}{SCALE}.{name}"] = packed.scales
            parts[f"{moment}{POWER}.{name}"] = packed.powers
        return parts

    def _apply_streamed(
        self, moments: HostMoments, lr: float, scale_of: Callable[[nn.Parameter], float]
    ) -> None:
        """The same step, of matrices whose moments come from host memory."""
        places = {one: (unit, name) for unit, named in self._units.items() for name, one in named.items()}
        for piece in moments.stream():
            unit, name = places[piece.parameter]
            self.streaming.use_weights(unit, changed=True)
            self.streaming.use_gradients(unit)
            scale = scale_of(piece.parameter)
            step = self._adamw_step(unit, name, piece.parameter, lr, scale, piece.first)
            weight = piece.parameter.view(-1)[piece.first : piece.first + piece.count]
            gradient = self.gradients.part(piece.parameter, piece.first, piece.count)
            if self._training.moments == "fp8":
                adamw_step(weight, gradient, *piece.packed, step)
            else:
                step_piece(weight, gradient, piece, step)

    def _adamw_step(
        self,
        unit: str,
        name: str,
        parameter: nn.Parameter,
        lr: float,
        clip_coefficient: float,
        first: int = 0,
    ) -> AdamWStep:
        training, step = self._training, self._steps[unit]
        # Both copies of a tied weight must round alike.
        place = ("", "tied") if parameter in self._tied else (unit, name)
        # So must the replicas of a whole parameter, but each shard of one draws for itself.
        of_shard = f" of rank {self._rank.index}" if parameter in self._sharded else ""
        return AdamWStep(
            lr=lr,
            beta1=training.beta1,
            beta2=training.beta2,
            eps=training.eps,
            weight_decay=training.weight_decay,
            step=step,
            clip_coefficient=clip_coefficient,
            salt=salt(self._seed, step=step, layer=place[0], purpose=f"rounding {place[1]}{of_shard}"),
            first=first,
        )


class _AdamW:
    """torch's AdamW with moments in float32, by its function: the first of its optimizers that a process
    makes imports torch's compiler, which takes seconds. On a GPU in one pass over all state, by its own
    kernel."""

    def __init__(self, parameters: Iterable[nn.Parameter], training: TrainingSection) -> None:
        self._training = training
        self.state = {
            parameter: {
                # On a GPU the step reads it there.
                STEP: torch.zeros((), device=parameter.device if parameter.is_cuda else "cpu"),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }
            for parameter in parameters
        }

    def step(self, gradients: Mapping[nn.Parameter, Tensor], lr: float, weight_decay: float) -> None:
        """One step of these parameters, in place."""
        states = [self.state[parameter] for parameter in gradients]
        means, squares = ([state[moment] for state in states] for moment in MOMENTS)
        adamw_of(
            list(gradients),
            list(gradients.values()),
            means,
            squares,
            [],
            [state[STEP] for state in states],
            amsgrad=False,
            beta1=self._training.beta1,
            beta2=self._training.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._training.eps,
            maximize=False,
            fused=any(parameter.is_cuda for parameter in gradients),
        )


def sum_tied_gradients(head: Tensor, embed: Tensor) -> Tensor:
    """The gradient of both copies of a tied weight, which takes the place of the head's.

    The order is fixed: head's share + embed's share.
    """
    return head.add_(embed)


def _sum_of_squares(norms: Iterable[float]) -> float:
    """In their order, and with the same bits on every Python: since 3.12 its `sum` rounds in another way."""
    total = 0.0
    for norm in norms:
        total += norm * norm
    return total


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """A copy of a tensor in this machine's memory."""
    return tensor.detach().to("cpu", copy=True)
