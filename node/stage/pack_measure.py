"""Measures how long packing a block's tensors takes on this node's device, operator by operator."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.blockfloat import ops
from kernels.layers import ops as layers
from node.config.schema import RunConfig
from node.model.chunk import HALVES
from node.model.families.known import family_of
from node.model.storage import PACKED
from node.stage.stopwatch import seconds_of
from node.tuning.block_times import PackTime, stored_forms

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One way to compute forward and backward."""

    forward: Callable[[], object]
    backward: Callable[[], object]


def pack_times(config: RunConfig, device: torch.device) -> tuple[PackTime, ...]:
    """The times for a microbatch of each kind and form in which blocks of this run may be stored
    (`stored_forms`). Work on a whole microbatch is measured on a single sample.

    Kernels of norms and activations pack their own results: their time is the difference from the kernels
    that do not pack.
    """
    samples, work = config.training.microbatch, _Kinds(config, device)
    plain: dict[str, tuple[float, float]] = {}
    measured = []
    for kind, form in stored_forms(config):
        with torch.no_grad():
            if kind not in plain:
                plain[kind] = _timed(device, work.of(kind, 0))
            packed = _timed(device, work.of(kind, PACKED[form]))
        pack, unpack = (
            samples * max(0.0, whole - other) for whole, other in zip(packed, plain[kind], strict=True)
        )
        measured.append(PackTime(kind=kind, form=form, pack=pack, unpack=unpack))
    return tuple(measured)


def _timed(device: torch.device, works: list[_Work]) -> tuple[float, float]:
    """The seconds of forward and backward of all this work."""
    totals = [seconds_of(device, work.forward, work.backward) for work in works]
    return sum(part for part, _ in totals), sum(part for _, part in totals)


class _Kinds:
    """Tensors of one sample, with the shapes that a block has."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._dtype = HALVES.get(config.training.precision, torch.float32)

    def of(self, kind: str, bits: int) -> list[_Work]:
        """The operators for one kind of tensor that is kept in this many bits; 0: as computed."""
        widths = family_of(self._config.model).kept_widths(self._config.model)[kind]
        if kind == "norm_input":
            return [self._norm(width, bits) for width in widths]
        if kind == "ffn_input":
            inputs = len(family_of(self._config.model).ffn_inputs)
            # A token has a row for each of its experts.
            return [self._feed_forward(inputs, len(widths) // inputs, bits)]
        return [self._store(width, bits) for width in widths]

    def _tensor(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(1, self._config.model.sequence, width, device=self._device).to(dtype)

    def _store(self, width: int, bits: int) -> _Work:
        x, dtype = self._tensor(width, self._dtype), self._dtype
        if not bits:
            return _Work(forward=lambda: None, backward=lambda: None)
        packed = ops.store(x, bits)
        return _Work(
            forward=lambda: ops.store(x, bits),
            backward=lambda: ops.restore(packed, list(x.shape), bits, dtype),
        )

    def _norm(self, width: int, bits: int) -> _Work:
        x, grad = self._tensor(width, torch.float32), self._tensor(width, self._dtype)
        weight, dtype = torch.ones(width, device=self._device), self._dtype
        bias = torch.zeros_like(weight) if family_of(self._config.model).norm_has_bias else None
        if not bits:
            return _Work(
                forward=lambda: layers.norm(x, weight, bias, EPS, dtype),
                backward=lambda: (
                    layers.norm(x, weight, bias, EPS, dtype),
                    layers.norm_backward(grad, x, x, weight, bias, EPS),
                ),
            )
        packed = ops.store(x, bits)
        return _Work(
            forward=lambda: ops.norm_store(x, weight, bias, EPS, bits, dtype),
            backward=lambda: (
                ops.norm_from_stored(packed, list(x.shape), weight, bias, EPS, bits, dtype),
                ops.norm_backward(grad, packed, x, weight, bias, EPS, bits),
            ),
        )

    def _feed_forward(self, inputs: int, rows: int, bits: int) -> _Work:
        model = self._config.model
        gelu = model.activation == "gelu"
        gate, up, grad = (
            self._tensor(rows * model.ffn, self._dtype).view(1, -1, model.ffn) for _ in range(3)
        )
        # Each call overwrites `grad`.
        both = (gate, up if inputs == 2 else None)
        if not bits:
            return _Work(
                forward=lambda: layers.activation(*both, gelu),
                backward=lambda: layers.activation_backward(grad, *both, gelu),
            )
        packed = ops.store(gate, bits), None if inputs < 2 else ops.store(up, bits)
        return _Work(
            forward=lambda: ops.ffn_store(*both, bits, gelu),
            backward=lambda: ops.ffn_backward(grad, *packed, bits, gelu),
        )
