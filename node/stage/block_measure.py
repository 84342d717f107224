"""Measures the times that a memory plan needs on this node's device: a block's passes and parts, packing, and
copies to the host and back during compute. Takes a second or two, once per run.

    python -m node.stage.block_measure gpu|cpu < RUN.json

measures for the run file given as JSON on standard input. It is a separate process, so that `thinwire plan
--measure` needs no torch itself.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.ops import attention
from kernels.blockfloat import ops
from kernels.layers import ops as layers
from node.config.schema import RunConfig
from node.model.chunk import HALVES, build_chunk, weight_dtype
from node.model.families.known import family_of
from node.model.host_memory import HostMemory, host_memory
from node.model.storage import PACKED, configured
from node.model.units import block_name
from node.run_file.loader import from_json
from node.schedule.placement import slice_ranges, slices_of
from node.stage.machine_info import fix_order
from node.stage.passes import AutogradPasses, ChunkCall
from node.stage.stopwatch import seconds_of
from node.tuning.block_times import BlockTimes, PackTime, assumed_times, stored_forms
from node.tuning.device_memory import Devices

log = logging.getLogger(__name__)

COPIED = 1 << 28
"""The bytes of a measured copy."""


def block_seconds(config: RunConfig, device: torch.device) -> float:
    """The seconds of wall time for forward and backward of one block for a microbatch; 0 if it cannot be
    measured.

    Stages are assigned by this speed. It changes no bit.
    """
    if device.type == "cuda" and (times := measured_times(config, device)) is not None:
        return slices_of(config) * (times.forward + times.backward)
    try:
        passes = _Passes(config, device, config.training.microbatch)
        return slices_of(config) * sum(seconds_of(device, passes.forward, passes.backward))
    except RuntimeError as error:
        log.warning("a block could not be measured on %s (%s)", device, _reason(error))
        return 0.0


def measured_times(config: RunConfig, device: torch.device) -> BlockTimes | None:
    """The measured times of a device that computes a stage alone; None if the measurement fails.

    Work on a whole microbatch or slice is measured on a single sample of the same length.
    """
    if device.type == "cuda":
        # Triton launches on the thread's current device.
        torch.cuda.set_device(device)
    try:
        return _measure(config, device)
    except RuntimeError as error:
        # Times only decide how fast a plan is, never whether it is correct.
        log.warning("a block could not be measured on %s (%s): its times are assumed", device, _reason(error))
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _reason(error: RuntimeError) -> str:
    return str(error).strip().split("\n")[0]


class _Passes:
    """Forward and backward of one of the run's blocks."""

    def __init__(self, config: RunConfig, device: torch.device, samples: int) -> None:
        model = config.model
        # The first slice attends to no earlier one and takes as long as any other.
        shape = (samples, len(slice_ranges(config)[0]), model.hidden)
        chunk = self._chunk = build_chunk(
            model,
            (block_name(0),),
            config.run.seed,
            device,
            weight_dtype(config.training.weights),
            configured(config.storage),
            lora=config.lora,
        )
        self._passes = AutogradPasses(ChunkCall(chunk), config.training.precision, device, 1)
        self.fed = torch.randn(shape, device=device)
        self._above = torch.randn(shape, device=device)

    def forward(self) -> None:
        self._chunk.zero_grad(set_to_none=True)
        self._passes.forward(0, self.fed, None)

    def backward(self) -> None:
        self._passes.backward(0, self._above)


def _measure(config: RunConfig, device: torch.device) -> BlockTimes:
    model, training = config.model, config.training
    samples = float(training.microbatch)
    passes = _Passes(config, device, 1)
    forward, backward = seconds_of(device, passes.forward, passes.backward)
    dtype = HALVES.get(training.precision, torch.float32)
    x = passes.fed.to(dtype)

    def product(outputs: int) -> float:
        weight = torch.randn(outputs, model.hidden, device=device, dtype=dtype)
        return seconds_of(device, lambda: F.linear(x, weight))[0]

    family = family_of(model)
    into_attention, _, into_ffn, _ = family.products(model)
    query, key = (
        torch.randn(1, heads, passes.fed.shape[1], model.width, device=device, dtype=dtype)
        for heads in (model.heads, family.kv_heads(model))
    )
    times = replace(
        assumed_times(config, Devices(on_cpu=device.type != "cuda")),
        forward=samples * forward,
        backward=samples * backward,
        attention=samples * product(into_attention.outputs),
        attention_output=samples * seconds_of(device, lambda: attention(query, key, key))[0],
        ffn_input=samples * product(into_ffn.outputs),
        stored=configured(config.storage),
        packing=pack_times(config, device),
        measured=True,
    )
    if device.type != "cuda":
        return times  # there is no other memory to move to
    memory = host_memory(device)
    square = x.reshape(-1, x.shape[-1])
    rate = copy_rate(memory, lambda: [square.t() @ square for _ in range(8)])
    return replace(times, out_rate=rate, in_rate=rate)


def copy_rate(memory: HostMemory, work: Callable[[], object], size: int = COPIED) -> float:
    """The bytes per second in each direction when both directions are used at once during `work`. A direction
    alone is at least as fast."""
    there, back = (torch.empty(size, dtype=torch.uint8, device=memory.device) for _ in range(2))
    out, into = (there, memory.empty(size)), (memory.empty(size), back)
    rate = 0.0
    # The first round touches the pages for the first time.
    for _ in range(2):
        memory.finish()
        began = memory.clock()
        memory.copy_out([out])
        memory.copy_in([into])
        work()
        memory.finish()
        rate = size / (memory.clock() - began)
    memory.wait_device()
    return rate


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


def main() -> int:
    kind = sys.argv[1]
    if kind == "gpu" and not torch.cuda.is_available():
        sys.stderr.write("torch finds no GPU on this machine: measure its CPU with --device cpu\n")
        return 2
    device = torch.device("cuda" if kind == "gpu" else "cpu", 0)
    fix_order(device)
    times = measured_times(from_json(sys.stdin.read()), device)
    if times is None:
        sys.stderr.write(f"a block of this run could not be computed on this machine's {kind}\n")
        return 2
    sys.stdout.write(times.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
