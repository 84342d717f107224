"""AdamW over the layer units that one process holds.

Everything is kept and reported by unit, so that norms sum to the same bits and snapshots restore on any
split. Weights, gradients and both moments are float32.
"""

from collections.abc import Iterable, Mapping

import torch
import torch._dynamo  # AdamW's constructor imports it: over a second that a run waiting for a node would lose
from torch import Tensor, nn

from node.config.schema import TrainingSection
from node.model.chunk import Chunk
from node.model.units import HEAD, tied_parameter
from wire.errors import RunError

PARAMETER = "parameter"
"""Prefix of weights in a unit's state; the moments' prefixes are AdamW's own names for them."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


class StageOptimizer:
    """Holds AdamW's state for the units of some chunks; gradients accumulate in their `.grad`."""

    def __init__(self, chunks: Iterable[Chunk], training: TrainingSection) -> None:
        self._units: dict[str, dict[str, nn.Parameter]] = {}
        # Both copies of a tied weight have the same gradient; the global norm counts the embedding's.
        self._counted: dict[str, list[nn.Parameter]] = {}
        for chunk in chunks:
            for unit, parameters in chunk.named_units():
                copy = tied_parameter(chunk.model, unit) if unit == HEAD else None
                self._units[unit] = parameters
                self._counted[unit] = [value for name, value in parameters.items() if name != copy]
        everything = [parameter for unit in self._units.values() for parameter in unit.values()]
        matrices = [parameter for parameter in everything if parameter.ndim >= 2]
        vectors = [parameter for parameter in everything if parameter.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": training.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=training.lr,
            betas=(training.beta1, training.beta2),
            eps=training.eps,
        )
        for parameter in everything:
            # What AdamW would create on its first step; made here so that there is always a state to save.
            self._adamw.state[parameter] = {
                STEP: torch.tensor(0.0),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(self._units)

    def zero_grad(self) -> None:
        """Drop all gradients: before a step, and when one is aborted."""
        self._adamw.zero_grad(set_to_none=True)

    def squared_norms(self) -> dict[str, float]:
        """Squared gradient norm of each unit, in float64, a tied weight counted once (in "embed").

        Summed in model order over all units, they give the same bits whatever the split. Values may be
        infinite or NaN; the coordinator refuses such a step.

        Raises:
            RunError: a parameter has no gradient.
        """
        norms: dict[str, float] = {}
        for unit, parameters in self._counted.items():
            total = 0.0
            for parameter in parameters:
                norm = torch.linalg.vector_norm(gradient_of(parameter), dtype=torch.float64).item()
                total += norm * norm
            norms[unit] = total
        return norms

    @torch.no_grad()
    def apply(self, lr: float, clip_coefficient: float) -> None:
        """Scale gradients by the global clip coefficient, take one AdamW step, drop the gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
            for parameter in group["params"]:
                gradient_of(parameter).mul_(clip_coefficient)
        self._adamw.step()
        self.zero_grad()

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        """A copy on the CPU of all that a unit needs to go on, so that training may continue meanwhile.

        Keys: "parameter.NAME", "exp_avg.NAME", "exp_avg_sq.NAME" (float32) and "step" (int64 scalar).
        """
        state: dict[str, Tensor] = {}
        steps = 0
        for name, parameter in self._units[unit].items():
            moments = self._adamw.state[parameter]
            steps = int(moments[STEP].item())
            state[f"{PARAMETER}.{name}"] = _copy(parameter)
            for moment in _MOMENTS:
                state[f"{moment}.{name}"] = _copy(moments[moment])
        state[STEP] = torch.tensor(steps, dtype=torch.int64)
        return state

    @torch.no_grad()
    def load_unit_state(self, unit: str, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `unit_state` returned; nothing changes unless all of it fits.

        Raises:
            RunError: a tensor is missing, unknown, or of another shape or dtype.
        """
        expected: dict[str, tuple[torch.dtype, torch.Size]] = {STEP: (torch.int64, torch.Size(()))}
        for name, parameter in self._units[unit].items():
            for prefix in (PARAMETER, *_MOMENTS):
                expected[f"{prefix}.{name}"] = (parameter.dtype, parameter.shape)
        _check_state(unit, expected, tensors)

        steps = tensors[STEP].item()
        for name, parameter in self._units[unit].items():
            moments = self._adamw.state[parameter]
            parameter.copy_(tensors[f"{PARAMETER}.{name}"])
            for moment in _MOMENTS:
                moments[moment].copy_(tensors[f"{moment}.{name}"])
            moments[STEP].fill_(steps)


def sum_tied_gradients(head: Tensor, embed: Tensor) -> Tensor:
    """The gradient of both copies of a tied weight. The order is fixed: head's share + embed's share."""
    return head + embed


def gradient_of(tensor: Tensor) -> Tensor:
    """What backward left in `.grad`.

    Raises:
        RunError: backward has not run.
    """
    if tensor.grad is None:
        raise RunError(f"a tensor of shape {list(tensor.shape)} has no gradient; backward must come first")
    return tensor.grad


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _check_state(
    unit: str, expected: Mapping[str, tuple[torch.dtype, torch.Size]], tensors: Mapping[str, Tensor]
) -> None:
    advice = "the snapshot is of another model; resume with the run's own config"
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"holds unknown {unknown[0]}"
        raise RunError(f"state of unit {unit} {what}; {advice}")
    for name, (dtype, shape) in expected.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.shape != shape:
            raise RunError(
                f"state of unit {unit}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {dtype} {list(shape)}; {advice}"
            )
