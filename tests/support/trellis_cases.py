"""What the `trellis` codec's loops compute, in plain torch, and its lanes under Triton."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.trellis import factors as trellis_factors
from kernels.trellis import scales as trellis_scales
from kernels.trellis.code import Coded
from kernels.trellis.factors import Factors, Space
from kernels.trellis.grid import Grid

if TYPE_CHECKING:
    from kernels.trellis.triton.lanes import Lanes


def parts(x: torch.Tensor) -> torch.Tensor:
    """Magnitudes as integers, in units of 2**-9."""
    return x.abs().mul_(2.0**9).round_()


def predict(factors: Factors) -> torch.Tensor:
    """The prediction, fp32 `[R, C]`."""
    _, multiplier, v, row_power, column_power = trellis_factors.prediction(factors)
    product = ((factors.u.int() * multiplier).double() @ v.double().T).float()
    return product.mul_(row_power.unsqueeze(1)).mul_(column_power)


def fit(x: torch.Tensor, space: Space) -> Factors:
    """The prediction in a space for all rows of a matrix `[R, C]`."""
    rows, _ = trellis_scales.in_turn(x, True, False)
    octaves = torch.div(rows + trellis_scales.OCTAVE // 2, trellis_scales.OCTAVE, rounding_mode="floor")
    exponent = (octaves - space.row_base).clamp(0, trellis_factors.MAX_EXPONENT_STEP)
    row_power = (2.0 ** (5 - space.base - exponent)).unsqueeze(1)
    white = (x * row_power).mul_(2.0 ** (-space.column_exponent))
    image = white.round_().clamp_(-255, 255).double() @ space.v
    unit = np.ldexp(np.maximum(space.multiplier, 1).astype(np.float64), space.fine)
    limit = (1 << (space.bits - 1)) - 1
    found = (image / space.energy / torch.from_numpy(unit)).round_().clamp_(-limit, limit)
    used = torch.from_numpy(space.multiplier > 0)
    return space.factors(torch.where(used, found, 0.0).to(torch.int8), exponent)


def empty_lanes(where: Grid, device: torch.device, *, slots: int, at_once: int) -> "Lanes":
    """Buffers for the lanes of a grid. Those of results have a row for each slot."""
    from kernels.trellis.triton.lanes import Lanes

    sizes = Lanes.sizes(where, slots=slots, at_once=at_once)
    decisions, states, counts, words = (
        torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.values()
    )
    states, words = (part.view(slots, where.groups, -1) for part in (states, words))
    return Lanes(where, at_once, decisions, states, counts.view(slots, -1), words)


def encode_lanes(
    residual: torch.Tensor,
    classes: torch.Tensor,
    gain: float,
    where: Grid,
    family: int,
    salt: int | None = None,
) -> Coded:
    """`kernels.trellis.lanes.encode` by Triton, on the device of `residual`."""
    control = torch.tensor([1, family, 0, 0], device=residual.device)
    gains = torch.tensor([gain], dtype=torch.float64, device=residual.device)
    lanes = empty_lanes(where, residual.device, slots=1, at_once=1)
    lanes.encode(residual, classes, control, gains, salt=salt)
    return Coded(lanes.states[0], lanes.counts[0], lanes.words[0])
