"""The optimizer of the layer units that one process holds, whatever `training.optimizer` is.

Everything is kept and reported by unit, so that norms sum to the same bits and snapshots restore on any
split. `node.model.optimizers` declares what is kept for a parameter, `node.training.update_rules` has the
arithmetic, and `node.training.gradients` keeps gradients. Snapshots hold weights as float32, which represents
bfloat16 exactly.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.common import dispatch
from kernels.fp8.reference import Fp8Gradient
from kernels.fp8.rows import Coded
from node.config.schema import TrainingSection
from node.model.blocks import Block
from node.model.chunk import Chunk
from node.model.host_memory import HostMemory
from node.model.lora import DropoutSource
from node.model.optimizers import (
    OUTER_PREFIX,
    PARAMETER_PREFIX,
    STEP,
    Layout,
    Part,
    UpdateRule,
    layout_problem,
    state_layout,
    update_rule,
)
from node.model.products import AddProduct
from node.model.rng import salt
from node.model.shards import Shard
from node.model.streamed import Streaming
from node.model.tensor_rank import TensorRank
from node.model.units import HEAD, tied_parameter
from node.training.gradients import MOST_TO_NEAREST, Fp8Gradients, Gradients, PlainGradients, norms
from node.training.host_moments import HostMoments
from node.training.loss_scale import SKIPPED
from node.training.schedule import clip_coefficient
from node.training.update_rules import Step, Turn, Updates, updates_of
from wire.errors import NonFiniteError, RunError


class StateTensor(NamedTuple):
    """A tensor of a state, not a copy."""

    tensor: Tensor
    saved: torch.dtype
    """Its dtype in a snapshot."""


class StageOptimizer:
    """Holds the main gradients and the optimizer's state for the units of some chunks."""

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
        slices: int = 1,
    ) -> None:
        """
        Args:
            seed: the run's seed, for stochastic rounding of bfloat16 weights and of gradients in e4m3.
            rank: the tensor-parallel rank of the chunks' shards.
            gradients_in_place: gradients never move in memory.
            host: keeps the matrices' moments there. The step has the same bits.
            streaming: that of the chunks, whose weights may be in host memory.
            gradients_away: blocks whose matrices' main gradients start in `host`.
            codes_away: blocks whose codes for products in FP8 start in `host`. Codes, weights and gradients
                may be there only together with the moments.
            slices: the number of slices of each microbatch, whose gradients are added one by one.
        """
        self._units: dict[str, dict[str, nn.Parameter]] = {}
        # Both copies of a tied weight have the same gradient. The global norm counts the embedding's.
        self._counted: dict[str, list[nn.Parameter]] = {}
        self._tied: set[nn.Parameter] = set()
        self._rank = rank or TensorRank()
        self._dropouts: list[DropoutSource] = []
        self._shards: dict[nn.Parameter, Shard] = {}
        self._blocks: dict[str, Block] = {}
        trained_whole: dict[str, Block] = {}
        experts: dict[tuple[str, str], int] = {}
        for chunk in chunks:
            if chunk.dropout is not None:
                self._dropouts.append(chunk.dropout)
            layers = zip(chunk.units, chunk.layers, strict=True)
            blocks = {unit: layer for unit, layer in layers if isinstance(layer, Block)}
            self._blocks |= blocks
            trained_whole |= {} if chunk.lora.rank else blocks
            for unit, parameters in chunk.named_units():
                copy = tied_parameter(chunk.model, unit)
                self._units[unit] = parameters
                experts |= {(unit, spec.name): spec.experts for spec in chunk.trained_specs(unit)}
                self._tied.update(value for name, value in parameters.items() if name == copy)
                self._shards |= {
                    parameters[spec.name]: Shard(spec, self._rank)
                    for spec in chunk.trained_specs(unit)
                    if self._rank.count > 1 and spec.pieces is not None
                }
                counted = copy if unit == HEAD else None
                self._counted[unit] = [value for name, value in parameters.items() if name != counted]
        self._places = {
            parameter: (unit, name)
            for unit, named in self._units.items()
            for name, parameter in named.items()
        }
        everything = tuple(self._places)
        self._training = training
        self._additions = training.global_batch // training.microbatch * slices
        self._rules = {
            parameter: update_rule(training, unit, name, tuple(parameter.shape), experts[unit, name])
            for parameter, (unit, name) in self._places.items()
        }
        self._updates: dict[UpdateRule, Updates] = {
            rule: updates_of(rule, training) for rule in self._rules.values()
        }
        self._seed = seed
        self.streaming = streaming or Streaming()
        self._in_blocks = {
            unit: [parameter for parameter in self._units[unit].values() if parameter.ndim >= 2]
            for unit in self._blocks
        }
        """Trained matrices of blocks by unit, in model order."""
        self.gradients: Gradients
        if training.gradients == "fp8":
            salts = self._gradient_salts() if self._rounds_stochastically else None
            away = {parameter for unit in gradients_away for parameter in self._in_blocks[unit]}
            self.gradients = Fp8Gradients(everything, in_place=gradients_in_place, salts=salts, away=away)
        else:
            self.gradients = PlainGradients(everything, in_place=gradients_in_place)
        if training.precision != "float32" and any(dispatch.has_kernels(p.device) for p in everything):
            for block in trained_whole.values():
                block.add_weight_gradients(self._adding_to)
        for block in self._blocks.values():
            block.fixed_order = training.deterministic
            if training.weight_gradients == "fp8":
                block.code_weight_gradients()
        self._coded = self._blocks if training.compute == "fp8" else {}
        """Blocks whose products are in FP8."""
        self.streaming.coded = bool(self._coded)
        if host is not None:
            self.move_gradients(host, gradients_away, away=training.gradients == "fp8")
            self.streaming.move_codes(host, codes_away, self._coded)
        self.weights_changed()
        self._steps = dict.fromkeys(self._units, 0)
        self.outer: dict[nn.Parameter, Tensor] = {}
        """The outer momentum of all parameters, float32 on the CPU; empty before a run's first round has
        ended."""
        self._moments: dict[nn.Parameter, list[Tensor]] = {}
        """The moments on the device by parameter, in the order of `UpdateRule.keys`."""
        self._place_moments(host)

    def _place_moments(self, host: HostMemory | None) -> None:
        """Create moments that start at 0. Those of matrices are on the device or in `host`."""
        there = {
            parameter: rule
            for parameter, rule in self._rules.items()
            if host is not None and parameter.ndim >= 2
        }
        self._on_host = None if host is None else HostMoments(host, there, self._training)
        self._moments = {
            parameter: [self._zeros(parameter, part) for part in self._keys(parameter).values()]
            for parameter in self._rules
            if parameter not in there
        }

    @staticmethod
    def _zeros(parameter: nn.Parameter, part: Part) -> Tensor:
        dtype, device = getattr(torch, part.dtype), parameter.device
        flat = torch.full((part.count(parameter.numel()),), part.first, dtype=dtype, device=device)
        return _shaped(flat, part, parameter)

    def _keys(self, parameter: nn.Parameter) -> dict[str, Part]:
        """The tensors of a parameter's moments by their names in its unit's state."""
        name = self._places[parameter][1]
        return self._rules[parameter].keys(self._training, name, is_matrix=parameter.ndim >= 2)

    @torch.no_grad()
    def move_moments(self, host: HostMemory | None) -> None:
        """Move the matrices' moments to `host`, or back to the device if None, between two steps."""
        if (host is None) == (self._on_host is None):
            return
        kept = {parameter: self.moments_of(parameter) for parameter in self._rules}
        self._place_moments(host)
        for parameter, moments in kept.items():
            self.put_moments(parameter, moments)

    def move_weights(self, host: HostMemory, blocks: Collection[str]) -> None:
        """Keep the weights of these blocks' matrices in `host`, and those of others on the device. With
        adapters, the frozen weights move."""
        self.streaming.move_weights(host, blocks, self._blocks)

    def move_codes(self, host: HostMemory, blocks: Collection[str]) -> None:
        """Like `move_weights`, for the blocks' codes for products in FP8."""
        self.streaming.move_codes(host, blocks, self._coded)

    def move_gradients(self, host: HostMemory, blocks: Collection[str], *, away: bool = False) -> None:
        """Like `move_weights`, for the blocks' main gradients. With `away`, they have no memory yet."""
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
        return tuple(parameter for unit in self._units.values() for parameter in unit.values())

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether other tensor-parallel ranks hold other parts of the parameter."""
        return parameter in self._shards

    @property
    def moment_bytes(self) -> int:
        """The bytes that moments take, without those in host memory."""
        return sum(moment.nbytes for moments in self._moments.values() for moment in moments)

    def zero_grad(self) -> None:
        """Drop all gradients: before a step, and when one is aborted."""
        self.streaming.begin_passes()
        self.gradients.clear()

    def weights_changed(self) -> None:
        """Compute the codes of weights for products in FP8 again."""
        if self.streaming.codes is not None:
            self.streaming.codes.blank()
        for unit, block in self._coded.items():
            self.streaming.code(unit, block)

    def begin_forward(self, microbatch: int) -> None:
        """Prepare the forward of this microbatch: adapters drop elements by its salt, on every rank. With
        slices, numbers are those of `wire.spec.TensorKey`."""
        if self._dropouts:
            purpose = f"dropout of microbatch {microbatch}"
            drawn = salt(self._seed, step=self._next_step, layer="", purpose=purpose)
            for source in self._dropouts:
                source.begin(drawn)

    @property
    def _next_step(self) -> int:
        """The step that `apply` will take. All units are at the same step, and a repeated attempt has the
        same number."""
        return 1 + next(iter(self._steps.values()), 0)

    def begin_backward(self, microbatch: int, rank: int = 0) -> None:
        """Prepare the backward of this microbatch, numbered as for `begin_forward`.

        Args:
            rank: this process's number among those of its node that share the microbatch. Each rounds by
                other random bits, so that their errors do not add up.
        """
        if self._rounds_stochastically:
            purpose = f"gradients of microbatch {microbatch} on rank {rank}"
            self.gradients.begin_microbatch(salt(self._seed, step=self._next_step, layer="", purpose=purpose))

    @property
    def _rounds_stochastically(self) -> bool:
        return self._training.gradients == "fp8" and self._additions > MOST_TO_NEAREST

    def _gradient_salts(self) -> dict[nn.Parameter, int]:
        """The salts depend on unit and name, so they are the same on any split."""
        return {
            parameter: salt(self._seed, step=0, layer=unit, purpose=f"gradients of {name}")
            for unit, parameters in self._units.items()
            for name, parameter in parameters.items()
        }

    def squared_norms(self) -> dict[str, float]:
        """The squared gradient norm of each unit, in float64. A tied weight is counted once (in "embed").

        Summed in model order over all units, they give the same bits whatever the split. Values may be
        infinite or NaN; the coordinator refuses such a step.

        Raises:
            RunError: a parameter has no gradient.
        """
        return self.sum_squared_norms([self.parameter_squared_norms()])

    def parameter_squared_norms(self) -> list[float]:
        """The squared gradient norm of each counted parameter, or of this rank's shard of it, in model
        order."""
        counted = [(unit, parameter) for unit, named in self._counted.items() for parameter in named]
        return [_sum_of_squares(pieces) for pieces in self._norms_of(counted)]

    def _norms_of(self, places: Iterable[tuple[str, nn.Parameter]]) -> list[list[float]]:
        """The norms of the pieces of each parameter's gradient, as from `norms`, by unit and parameter."""
        norms_of = []
        for unit, named in groupby(places, key=itemgetter(0)):
            self.streaming.use_gradients(unit)
            norms_of += norms([self.gradients.stored(parameter) for _, parameter in named])
        if not norms_of:
            return []
        # This waits for the device once, for all norms.
        values = iter(torch.stack([norm for pieces in norms_of for norm in pieces]).tolist())
        return [[next(values) for _ in pieces] for pieces in norms_of]

    def sum_squared_norms(self, ranks: Sequence[Sequence[float]]) -> dict[str, float]:
        """The units' squared norms from the `parameter_squared_norms` of all tensor-parallel ranks, in their
        order.

        A replicated parameter's gradient is the same on all ranks and is counted once.
        """
        squares: dict[str, float] = {}
        each = zip(*ranks, strict=True)
        for unit, parameters in self._counted.items():
            total = 0.0
            for parameter in parameters:
                shards = next(each)
                for norm in shards if parameter in self._shards else shards[:1]:
                    total += norm
            squares[unit] = total
        return squares

    def take_gradients(self, unit: str) -> dict[str, Tensor | Fp8Gradient]:
        """A unit's gradients by parameter, for the caller to keep. They restart at 0.

        Raises:
            RunError: a parameter has no gradient.
        """
        with torch.no_grad():
            self.streaming.use_gradients(unit, changed=True)
            return {name: self.gradients.take(parameter) for name, parameter in self._units[unit].items()}

    def put_gradients(self, unit: str, values: Mapping[str, Tensor]) -> None:
        """Replace all of a unit's gradients by copies of these, float32 [elements] by parameter."""
        with torch.no_grad():
            self.streaming.use_gradients(unit, changed=True)
            for name, parameter in self._units[unit].items():
                self.gradients.put(parameter, values[name].view(parameter.shape))

    def apply(self, lr: float, clip_coefficient: float) -> None:
        """Scale gradients by the global clip coefficient, take one step and drop the gradients.

        A step whose coefficient is `SKIPPED` only drops them: the optimizer does not count it.
        """
        if clip_coefficient == SKIPPED:
            self.zero_grad()
            return
        self._step(lr, lambda _: clip_coefficient)

    def local_step(self, lr: float, taken: int, scale: float) -> None:
        """Take one optimizer step of a round and drop the gradients.

        No stage waits for others, because each parameter's gradient is clipped by its own norm.

        Args:
            taken: the number of local steps since the round began.
            scale: the factor of gradients.

        Raises:
            NonFiniteError: a gradient is not finite. Nothing has changed.
        """
        coefficients: dict[nn.Parameter, float] = {}
        norms_of = self._norms_of((unit, parameter) for parameter, (unit, _) in self._places.items())
        for (parameter, (unit, name)), pieces_of in zip(self._places.items(), norms_of, strict=True):
            norm = scale * math.sqrt(_sum_of_squares(pieces_of))
            if not math.isfinite(norm):
                raise NonFiniteError(f"the gradient of {name} of {unit} in local step {taken + 1}")
            coefficients[parameter] = scale * clip_coefficient(norm, self._training.clip)
        self._step(lr, coefficients.__getitem__)

    @property
    def steps_taken(self) -> dict[str, int]:
        """The optimizer's count of steps, by unit. Rounds set it back."""
        return dict(self._steps)

    @steps_taken.setter
    def steps_taken(self, steps: Mapping[str, int]) -> None:
        self._steps.update(steps)

    def updates_of(self, parameter: nn.Parameter) -> Updates:
        return self._updates[self._rules[parameter]]

    def moments_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """A parameter's moments in the order of `UpdateRule.keys`; plain ones in its shape. They are the
        optimizer's own tensors, or CPU copies if they are in host memory."""
        if parameter in self._moments:
            return self._moments[parameter]
        assert self._on_host is not None
        kept = zip(self._on_host.whole(parameter), self._keys(parameter).values(), strict=True)
        return [_shaped(moment, part, parameter) for moment, part in kept]

    @torch.no_grad()
    def put_moments(self, parameter: nn.Parameter, moments: Sequence[Tensor]) -> None:
        """Replace the tensors of `moments_of` by copies of these."""
        if self._on_host is not None and parameter in self._on_host:
            self._on_host.load(parameter, moments)
            return
        for kept, value in zip(self._moments[parameter], moments, strict=True):
            kept.copy_(value, non_blocking=True)

    @torch.no_grad()
    def _step(self, lr: float, scale_of: Callable[[nn.Parameter], float]) -> None:
        """Take one step. `scale_of` returns the factor of a parameter's gradient."""
        for unit in self._units:
            self._steps[unit] += 1
        together: dict[tuple[Updates, float], list[nn.Parameter]] = {}
        each: dict[Updates, list[Turn]] = {}
        for parameter, moments in self._moments.items():
            updates = self.updates_of(parameter)
            rule = self._rules[parameter]
            is_packed = len(moments) > len(rule.moments)
            is_gathered = rule.needs_whole and parameter in self._shards
            if is_packed or is_gathered or parameter.grad is None:
                # A gradient that is unpacked or gathered for a step in float32 exists for this step only.
                of_all = self.gradients
                gradient = of_all.stored(parameter) if is_packed else of_all.get(parameter)
                turn = Turn(parameter, gradient, moments, self._step_of(parameter, lr, scale_of(parameter)))
                if is_packed and turn.step.shard is None:
                    each.setdefault(updates, []).append(turn)
                else:
                    updates.step(*turn)
            else:
                together.setdefault((updates, self._decay(parameter)), []).append(parameter)
        for updates, turns in each.items():
            updates.step_each(turns)
        if self._on_host is not None:
            self._step_streamed(self._on_host, lr, scale_of)
        for (updates, decay), parameters in together.items():
            gradients = [self.gradients.get(parameter) for parameter in parameters]
            torch._foreach_mul_(gradients, [scale_of(parameter) for parameter in parameters])
            step = Step(lr=lr, weight_decay=decay, number=self._next_step - 1)
            updates.step_together(
                parameters, gradients, [self._moments[parameter] for parameter in parameters], step
            )
        self.weights_changed()
        self.zero_grad()

    def _step_streamed(
        self, moments: HostMoments, lr: float, scale_of: Callable[[nn.Parameter], float]
    ) -> None:
        """Take the same step for matrices whose moments are streamed from host memory."""
        for piece in moments.stream():
            parameter = piece.parameter
            unit = self._places[parameter][0]
            self.streaming.use_weights(unit, changed=True)
            self.streaming.use_gradients(unit)
            step = self._step_of(parameter, lr, scale_of(parameter), piece.first)
            shape = parameter.shape if piece.count == parameter.numel() else (piece.count,)
            weight = parameter.view(-1)[piece.first : piece.first + piece.count].view(shape)
            gradient = self.gradients.part(parameter, piece.first, piece.count)
            if isinstance(gradient, Tensor):
                gradient = gradient.view(shape)
            parts = self._keys(parameter).values()
            of_piece = [
                _shaped(moment, part, weight) for moment, part in zip(piece.moments, parts, strict=True)
            ]
            self.updates_of(parameter).step(weight, gradient, of_piece, step)

    def _decay(self, parameter: nn.Parameter) -> float:
        return self._training.weight_decay if parameter.ndim >= 2 else 0.0

    def _step_of(self, parameter: nn.Parameter, lr: float, scale: float, first: int = 0) -> Step:
        unit, name = self._places[parameter]
        # Both copies of a tied weight must round alike.
        place = ("", "tied") if parameter in self._tied else (unit, name)
        # So must the replicas of a whole parameter, but each shard draws its own bits.
        of_shard = f" of rank {self._rank.index}" if parameter in self._shards else ""
        number = self._steps[unit]
        return Step(
            lr=lr,
            weight_decay=self._decay(parameter),
            number=number,
            scale=scale,
            salt=salt(self._seed, step=number, layer=place[0], purpose=f"rounding {place[1]}{of_shard}"),
            first=first,
            shard=self._shards.get(parameter),
        )

    def unit_tensors(self, unit: str) -> dict[str, StateTensor]:
        """A unit's whole state, not copied; keys and shapes are those of `state_layout`. Moments in host
        memory are copied."""
        self.streaming.use_weights(unit)
        count = torch.tensor(self._steps[unit], dtype=torch.int64)
        state = {STEP: StateTensor(count, count.dtype)}
        for name, parameter in self._units[unit].items():
            state[f"{PARAMETER_PREFIX}{name}"] = StateTensor(parameter.detach(), torch.float32)
            kept = zip(self._keys(parameter).items(), self.moments_of(parameter), strict=True)
            state |= {key: StateTensor(moment, getattr(torch, part.saved)) for (key, part), moment in kept}
            if parameter in self.outer:
                state[f"{OUTER_PREFIX}{name}"] = StateTensor(self.outer[parameter], torch.float32)
        return state

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        """A copy of a unit's whole state on the CPU, in the dtypes of `state_layout`."""
        return {
            name: copy_to_cpu(part.tensor).to(part.saved) for name, part in self.unit_tensors(unit).items()
        }

    @property
    def stays_in_place(self) -> bool:
        """Whether the whole state is on the device throughout a step's passes."""
        return self._on_host is None and self.streaming.weights is None

    @torch.no_grad()
    def load_unit_state(self, unit: str, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `unit_state`, or only its weights. Nothing changes unless all of it fits.

        Raises:
            RunError: a tensor is missing, unknown, or of another shape or dtype.
        """
        after_round = any(key.startswith(OUTER_PREFIX) for key in tensors)
        shapes = {name: tuple(parameter.shape) for name, parameter in self._units[unit].items()}
        actual: Layout = {
            key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for key, tensor in tensors.items()
        }
        expected = state_layout(self._training, unit, shapes, outer=after_round)
        has_moments = any(not key.startswith(PARAMETER_PREFIX) for key in tensors)
        if not has_moments:
            expected = {key: part for key, part in expected.items() if key.startswith(PARAMETER_PREFIX)}
        if problem := layout_problem(expected, actual):
            raise RunError(
                f"state of unit {unit}: {problem}; the snapshot is of another model: resume with the run's "
                "own config"
            )
        if has_moments:
            self._steps[unit] = int(tensors[STEP].item())
        self.streaming.use_weights(unit, changed=True)
        for name, parameter in self._units[unit].items():
            parameter.copy_(tensors[f"{PARAMETER_PREFIX}{name}"])
            self.outer.pop(parameter, None)
            if after_round:
                self.outer[parameter] = copy_to_cpu(tensors[f"{OUTER_PREFIX}{name}"])
            if has_moments:
                self.put_moments(parameter, [tensors[key] for key in self._keys(parameter)])
        if unit in self._coded:
            self.streaming.code(unit, self._coded[unit])


def sum_tied_gradients(head: Tensor, embed: Tensor) -> Tensor:
    """The gradient of both copies of a tied weight. It overwrites the head's.

    The order is fixed: the head's share, then the embedding's.
    """
    return head.add_(embed)


def _sum_of_squares(norms: Iterable[float]) -> float:
    """The sum in order, with the same bits on every Python. Since Python 3.12, `sum` rounds differently."""
    total = 0.0
    for norm in norms:
        total += norm * norm
    return total


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """A copy of a tensor in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


def _shaped(moment: Tensor, part: Part, parameter: Tensor) -> Tensor:
    """A flat moment, in the parameter's shape if it has a number for each element."""
    return moment.view(parameter.shape) if part.is_plain else moment
