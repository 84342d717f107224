"""Checks, by estimate and before joining, which stages of a run fit on this machine's devices."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from node.config.schema import RunConfig
from node.model.shard_shapes import check_sizes
from node.processes.doctor import Check, fail, ok, warn
from node.run_file.loader import load_config
from node.stage.machine_info import describe
from node.telemetry.format import bytes_text
from node.tuning.device_memory import devices_of
from node.tuning.memory import StageMemory, stage_memory
from node.tuning.memory_plan import least_stage_bytes
from node.tuning.storage_choice import narrowest, remedies
from wire.errors import RunError, ThinwireError
from wire.identity.enrolment import Hardware


def check_run(path: Path, chosen: tuple[torch.device, ...], tensor_parallel: int) -> Iterator[Check]:
    """Check whether these devices can share the run's blocks, and which stages fit on them."""
    try:
        config = load_config(path, ())
    except ThinwireError as error:
        yield fail("run file", str(error), "correct the run file")
        return
    yield devices_check(chosen, tensor_parallel)
    try:
        check_sizes(config, len(chosen), tensor_parallel)
    except RunError as error:
        fix = "give other --gpus or --tensor-parallel"
        yield fail("sharing", str(error), fix)
        return
    yield judge_stages(config, describe(chosen, tensor_parallel=tensor_parallel))


def devices_check(chosen: tuple[torch.device, ...], tensor_parallel: int) -> Check:
    names = ", ".join(map(str, dict.fromkeys(chosen)))
    if chosen[0].type == "cpu" and len(chosen) > 1:
        names += f" ({len(chosen)} processes)"
    return ok("devices", f"{names}, tensor parallel {tensor_parallel}")


def judge_stages(config: RunConfig, hardware: Hardware) -> Check:
    """Which stages fit into the machine's memory, as the coordinator judges: with the fewest bits that the
    run allows, recomputing, and moving to host memory."""
    stages, devices, offer = config.pipeline.stages, devices_of(hardware), hardware.memory_bytes
    needs = least_stage_bytes(narrowest(config), stages, devices)
    fitting = [stage for stage, need in enumerate(needs) if need <= offer]
    each = " on each device" if hardware.devices > 1 else ""
    offered = f"{bytes_text(offer)}{each}"
    if not fitting:
        changes = remedies(config, stages, devices, offer)
        return fail(
            "stages",
            f"the smallest of {stages} stages needs an estimated {bytes_text(min(needs))}{each}, with "
            f"everything recomputed or moved that can be; this machine offers {offered}",
            " or ".join(changes)
            or "fewer model.layers, more pipeline.stages, training.gradients and moments in fp8, or --gpus "
            "with --tensor-parallel",
        )
    kept = stage_memory(config, stages, devices)
    largest = max(kept, key=lambda stage: stage.total)
    detail = f"the largest of {stages} stages needs an estimated {_described(largest)}{each}; this machine "
    detail += f"offers {offered}"
    if len(fitting) == stages:
        tight = [str(stage) for stage, memory in enumerate(kept) if memory.total > offer]
        fewer = "stores in fewer bits, recomputes or moves to host memory"
        how = f", {_stages(tight)} if this machine {fewer} (thinwire plan says what)" if tight else ""
        return ok("stages", f"{detail}: any stage fits{how}")
    return warn(
        "stages",
        f"{detail}: only stages {', '.join(map(str, fitting))} fit",
        "join early, so that one of these is free, or let pipeline.split give stages equal shares",
    )


def _stages(numbers: Sequence[str]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _described(stage: StageMemory) -> str:
    state = stage.state + stage.snapshot
    return (
        f"{bytes_text(stage.total)} ({bytes_text(state)} weights, gradients, optimizer, a snapshot's copy, "
        f"{bytes_text(stage.kept)} activations between forward and backward, the rest at work)"
    )
