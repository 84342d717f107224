"""Measures what a memory plan weighs on this node's own card: a block's passes, its parts, and copies to the
host and back beside compute. Takes a second or two, once a run."""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.ops import attention
from node.config.schema import RunConfig
from node.model.chunk import HALVES, Chunk, build_chunk, compute_precision, weight_dtype
from node.model.host_memory import host_memory
from node.model.storage import configured, kv_width
from node.model.units import block_name
from node.pipeline.block_times import BlockTimes, assumed_times
from node.pipeline.device_memory import Devices

log = logging.getLogger(__name__)

RUNS = 3
ENOUGH_SECONDS = 2.0
"""Of measured passes on a CPU."""
COPIED = 1 << 28
"""Bytes."""


def block_seconds(config: RunConfig, device: torch.device) -> float:
    """Forward and backward of one of the run's blocks for a microbatch, in seconds of wall time; 0 if it
    cannot be measured.

    It says how fast this node is beside others, so that stages are given out by it; it decides no bit.
    """
    if (times := measured_times(config, device)) is not None:
        return times.forward + times.backward
    model, training = config.model, config.training
    try:
        chunk = _one_block(config, device)
        shape = (training.microbatch, model.sequence, model.hidden)
        fed, above = torch.zeros(shape, device=device).requires_grad_(), torch.ones(shape, device=device)
        taken: list[float] = []
        # The first one compiles. A slow machine is known after one more.
        while len(taken) <= RUNS and sum(taken[1:]) < ENOUGH_SECONDS:
            began = time.perf_counter()
            with compute_precision(training.precision, device):
                made = chunk(fed)
            made.backward(above)
            taken.append(time.perf_counter() - began)
            chunk.zero_grad(set_to_none=True)
    except RuntimeError as error:
        log.warning("a block could not be measured on %s (%s)", device, str(error).strip().split("\n")[0])
        return 0.0
    return statistics.median(taken[1:])


def measured_times(config: RunConfig, device: torch.device) -> BlockTimes | None:
    """Of a GPU that computes a stage alone; None elsewhere, and where that fails.

    What takes a whole microbatch is measured on one that is as long but has a single sample.
    """
    if device.type != "cuda":
        return None
    # Triton launches on the thread's current device.
    torch.cuda.set_device(device)
    try:
        return _measure(config, device)
    except RuntimeError as error:
        # Times only decide how fast a plan is, never whether it is right.
        reason = str(error).strip().split("\n")[0]
        log.warning("a block could not be measured on %s (%s): its times are assumed", device, reason)
        return None
    finally:
        torch.cuda.empty_cache()


def _one_block(config: RunConfig, device: torch.device) -> Chunk:
    return build_chunk(
        config.model,
        (block_name(0),),
        config.run.seed,
        device,
        weight_dtype(config.training.weights),
        configured(config.storage),
        lora=config.lora,
    )


def _measure(config: RunConfig, device: torch.device) -> BlockTimes:
    model, training = config.model, config.training
    chunk = _one_block(config, device)
    samples = float(training.microbatch)
    shape = (1, model.sequence, model.hidden)
    fed = torch.randn(shape, device=device).requires_grad_()
    above = torch.randn(shape, device=device)
    taken: list[tuple[float, float]] = []
    for _ in range(1 + RUNS):
        marks = [_event() for _ in range(3)]
        marks[0].record()
        with compute_precision(training.precision, device):
            made = chunk(fed)
        marks[1].record()
        made.backward(above)
        marks[2].record()
        marks[2].synchronize()
        taken.append((marks[0].elapsed_time(marks[1]) / 1e3, marks[1].elapsed_time(marks[2]) / 1e3))
        chunk.zero_grad(set_to_none=True)
    # The first one compiles.
    forward, backward = (statistics.median(one) for one in zip(*taken[1:], strict=True))
    del chunk, made
    dtype = HALVES.get(training.precision, torch.float32)
    x = fed.detach().to(dtype)

    def product(outputs: int) -> float:
        weight = torch.randn(outputs, model.hidden, device=device, dtype=dtype)
        return _seconds(lambda: F.linear(x, weight))

    query, key = (
        torch.randn(1, heads, model.sequence, model.width, device=device, dtype=dtype)
        for heads in (model.heads, kv_width(model) // model.width)
    )
    times = replace(
        assumed_times(config, Devices(on_cpu=False)),
        forward=samples * forward,
        backward=samples * backward,
        attention=samples * product(model.q_width + 2 * kv_width(model)),
        attention_output=samples * _seconds(lambda: attention(query, key, key)),
        ffn_input=samples * product((2 if model.family == "llama" else 1) * model.ffn),
    )
    out_rate, in_rate = _copy_rates(device, x)
    return replace(times, out_rate=out_rate, in_rate=in_rate)


def _copy_rates(device: torch.device, x: Tensor) -> tuple[float, float]:
    """Bytes a second out and in, both at a time and beside matrix products."""
    memory = host_memory(device)
    size = COPIED
    there, back = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    host, other = memory.empty(size), memory.empty(size)
    square = x.reshape(-1, x.shape[-1])
    rates = []
    for _ in range(2):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        memory.copy_out([(there, host)])
        memory.copy_in([(other, back)])
        for _ in range(8):
            square.t() @ square
        memory.finish()
        rates.append(size / (time.perf_counter() - began))
    torch.cuda.synchronize(device)
    # Pages are touched for the first time in the first round. Each way has at least the rate of both.
    return rates[-1], rates[-1]


def _seconds(work: Callable[[], object]) -> float:
    work()
    start, end = _event(), _event()
    start.record()
    for _ in range(RUNS):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / RUNS


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
