"""The tensors of a unit's state by name, and what the optimizer must find before it loads them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kernels.fp8.layout import blocks
from wire.errors import RunError

PARAMETER = "parameter"
"""Prefix of weights in a unit's state; the moments' prefixes are AdamW's own names for them."""
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE, POWER = "_scale", "_power"
"""Added to a moment's prefix: what its e4m3 codes stand for."""
STEP = "step"
OUTER = "outer"
"""Prefix of the outer optimizer's momentum in a unit's state, from the end of a run's first round on."""

Expected = dict[str, tuple[torch.dtype, torch.Size]]
"""dtype and shape by name."""


def expected_state(parameters: Mapping[str, nn.Parameter], *, packed: bool, after_round: bool) -> Expected:
    """What `StageOptimizer.unit_state` gives for these parameters.

    Args:
        packed: moments of matrices are in e4m3.
        after_round: with the outer optimizer's momentum.
    """
    expected: Expected = {STEP: (torch.int64, torch.Size(()))}
    for name, parameter in parameters.items():
        expected[f"{PARAMETER}.{name}"] = torch.float32, parameter.shape
        if after_round:
            expected[f"{OUTER}.{name}"] = torch.float32, parameter.shape
        count = torch.Size((blocks(parameter.numel()),))
        for moment in MOMENTS:
            if packed and parameter.ndim >= 2:
                expected[f"{moment}.{name}"] = torch.uint8, torch.Size((parameter.numel(),))
                expected[f"{moment}{SCALE}.{name}"] = torch.float32, count
                expected[f"{moment}{POWER}.{name}"] = torch.uint8, count
            else:
                expected[f"{moment}.{name}"] = torch.float32, parameter.shape
    return expected


def check_loaded(unit: str, expected: Expected, tensors: Mapping[str, Tensor]) -> None:
    """Raises RunError if a tensor is missing, unknown, or of another shape or dtype."""
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
