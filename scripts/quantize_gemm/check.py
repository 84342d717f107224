"""The fused kernel's stored bits against the CPU's reference, and its products against torch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import blocks_of, packed_bytes, payload_offset
from quantize_gemm.kernel import BITS, Config, quantize_gemm
from quantize_gemm.ways import EPS, Inputs, Layer, sample

TOLERANCE = 4e-3
"""Relative error of a product against fp64's: bf16 rounds what enters it and the result, 1.7e-3 each."""
PART_TOLERANCE = 2e-2
"""Of every row and every column by itself, against their mean norm, so that a wrong one shows."""
GUARD = 256
POISON = 0xA5


class Guarded:
    """Bytes that nobody has written, between guards."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._whole = torch.full((nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        self.bytes = self._whole[GUARD : GUARD + nbytes]

    def intact(self) -> bool:
        return bool((self._whole[:GUARD] == POISON).all() and (self._whole[-GUARD:] == POISON).all())


def cases(device: str, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[str, Inputs, bool]]:
    """A name, inputs, and whether all is finite; for every (rows, width, columns)."""
    for rows, width, columns in shapes:
        for norm, dtype in ((False, torch.bfloat16), (True, torch.float32), (True, torch.bfloat16)):
            layer = Layer(model="", name="", width=width, columns=columns, norm=norm, dtype=dtype)
            what = f"{'norm' if norm else 'SwiGLU'} {rows} x {width} x {columns} {dtype}"
            inputs = sample(rows, layer, device, seed=rows)
            yield what, inputs, True
            if rows > 8:
                wild = sample(rows, layer, device, seed=rows)
                for tensor in (wild.x, wild.beside):
                    if tensor is not None:
                        _make_wild(tensor)
                yield f"{what}, wild", wild, False


def _make_wild(x: Tensor) -> None:
    x[0], x[1, 5], x[2, 7] = 0, torch.nan, -torch.inf
    x[3] *= 1e-33
    x[4] *= 1e30
    x[5] = 1e38
    x[6], x[7] = -0.0, x[7] * 1e-38


def check(what: str, inputs: Inputs, finite: bool, config: Config) -> list[str]:
    """What is wrong, in words."""
    x, device = inputs.x, str(inputs.x.device)
    stored = [tensor for tensor in (x, inputs.beside) if tensor is not None]
    rows, columns = x.shape[0], inputs.weight.shape[0]
    result = Guarded(2 * rows * columns, device)
    out = result.bytes.view(torch.bfloat16).view(rows, columns)
    kept = [Guarded(packed_bytes(x.shape, BITS), device) for _ in stored]
    blocks = blocks_of(x.shape)
    for one in kept:
        one.bytes[2 * blocks : payload_offset(blocks, BITS)] = 0
    packed = tuple(one.bytes for one in kept)
    quantize_gemm(x, inputs.beside, inputs.scale, inputs.weight, out, packed, config=config, eps=EPS)
    wrong = []
    for place, (one, tensor) in enumerate(zip(kept, stored, strict=True)):
        wanted = blockfloat.pack(tensor.cpu(), BITS)
        differing = int((one.bytes.cpu() != wanted).sum())
        if differing:
            wrong.append(f"{differing} of {wanted.numel()} stored bytes of input {place} differ")
    if not all(one.intact() for one in (result, *kept)):
        wrong.append("written outside")
    if finite:
        wanted = exact(inputs)
        error = out.double() - wanted
        whole = float(error.norm() / wanted.norm())
        parts = [float(error.norm(dim=d).max() / wanted.norm(dim=d).mean()) for d in (0, 1)]
        # A NaN fails the comparison.
        if not (whole < TOLERANCE and max(parts) < PART_TOLERANCE):
            wrong.append(f"relative error {whole:.2g}, of a column {parts[0]:.2g}, of a row {parts[1]:.2g}")
    return [f"{what}, {config}: {problem}" for problem in wrong]


def exact(inputs: Inputs) -> Tensor:
    """The product in fp64."""
    x = inputs.x.double()
    if inputs.beside is not None:
        made = torch.nn.functional.silu(x) * inputs.beside.double()
    else:
        assert inputs.scale is not None
        made = torch.nn.functional.rms_norm(x, x.shape[1:], inputs.scale.double(), EPS)
    return made @ inputs.weight.double().t()
