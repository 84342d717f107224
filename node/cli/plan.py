"""`thinwire plan RUN.toml`: the memory that each stage needs, and how it fits into less."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from node.cli.measured_times import measured_times
from node.cli.parser import add_run_file, number

if TYPE_CHECKING:
    from node.tuning.block_times import BlockTimes
    from node.tuning.memory_plan import MemoryPlan

HOST_TIMES = 4
"""The assumed main memory of a machine, as a multiple of its card's memory."""
TYPICAL_GB = 16
IN_GENERAL = (
    "fewer blocks per stage (more pipeline.stages or fewer model.layers), a smaller training.microbatch, or "
    "gradients and moments in fp8"
)
"""General advice if no single setting is enough."""
MOST_POINTS = 12
"""The most points of a curve in text; `--json` has all."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("plan", help="show the memory of each stage, and what fits into less")
    add_run_file(parser)
    parser.add_argument("--gb", type=number, help="memory of each card in GB (default: unlimited)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="what computes a stage")
    parser.add_argument(
        "--host-gb",
        type=number,
        help="main memory for what does not fit on the GPU, in GB; 0: none (default: 4 times --gb)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="plan with times measured on this machine's device, as a node does when it joins",
    )
    parser.add_argument("--curve", action="store_true", help="show how each stage's time depends on memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.run_file.loader import load_config
    from node.tuning.block_times import assumed_times
    from node.tuning.device_memory import Devices
    from node.tuning.memory_plan import CURVE_POINTS, Room, frontier
    from node.tuning.storage_choice import choose, chosen_config, kept_bytes, remedies, words_of
    from wire.errors import UserError

    for option, value in (("--gb", args.gb), ("--host-gb", args.host_gb)):
        if value is not None and (value < 0 or (option == "--gb" and value == 0)):
            raise UserError(f"{option} {value:g} is no size: give memory in GB, such as 12")
    config = load_config(args.run_file, args.overrides)
    on_cpu = args.device == "cpu"
    card = args.gb or 0.0
    host_gb = HOST_TIMES * (card or TYPICAL_GB) if args.host_gb is None else args.host_gb
    host = 0 if on_cpu else int(1e9 * host_gb)
    stages, devices = config.pipeline.stages, Devices(on_cpu=on_cpu, host_bytes=host)
    memory = int(card * 1e9)
    times = measured_times(config, args.device) if args.measure else assumed_times(config, devices)
    room = Room(devices=devices, memory_bytes=memory, times=times)
    storages = [choose(config, stages, stage, room) for stage in range(stages)]
    configs = [chosen_config(config, storage) for storage in storages]
    plans = [room.plan(chosen, stages, stage) for stage, chosen in enumerate(configs)]
    points = CURVE_POINTS if args.curve or args.json else 2
    curves = [
        frontier(chosen, stages, stage, devices, times, points=points) for stage, chosen in enumerate(configs)
    ]
    fits = all(plan.fits for plan in plans)
    changes = [] if fits else remedies(config, stages, devices, memory)
    if args.json:
        stage_reports = [
            {
                "stage": stage,
                "storage": words_of(storage),
                "plan": _as_json(plan),
                "curve": [_as_json(memory_plan) for memory_plan in curve],
            }
            for stage, (storage, plan, curve) in enumerate(zip(storages, plans, curves, strict=True))
        ]
        whole = {
            "memory_bytes": memory,
            "stages": stage_reports,
            "what_fits": changes,
            "times": dataclasses.asdict(times),
        }
        sys.stdout.write(json.dumps(whole, indent=1) + "\n")
        return 0 if fits else 1
    lines = _text(plans, curves, args.device, card, curve=args.curve)
    lines += ["", *_times_text(times, on_cpu=on_cpu)]
    if config.storage.allow:
        lines += ["", "storage that the coordinator would choose (storage.allow):"]
        for stage, storage in enumerate(storages):
            kept = _gb(kept_bytes(config, storage, stages, devices)[stage])
            lines.append(f"  stage {stage}: {words_of(storage)}, {kept} if everything is kept")
    if not fits:
        lines += ["", f"what fits: {' or '.join(changes) or IN_GENERAL}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fits else 1


def _times_text(times: "BlockTimes", *, on_cpu: bool) -> list[str]:
    known = "measured here" if times.measured else "assumed (--measure measures them)"
    lines = [
        f"times of a block, {known}: forward {_ms(times.forward)}, backward {_ms(times.backward)}",
        f"  recomputing: attention {_ms(times.attention)}, attention_output {_ms(times.attention_output)}, "
        f"ffn_input {_ms(times.ffn_input)}",
    ]
    if not on_cpu:
        lines.append(f"  copies: {times.out_rate / 1e9:.1f} GB/s out, {times.in_rate / 1e9:.1f} in")
    lines += [
        f"  {time.kind} in {time.form if time.form == 'bf16' else f'{time.form} bits'}: "
        f"packed in {_ms(time.pack)}, unpacked in {_ms(time.unpack)}"
        for time in times.packing
    ]
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _text(
    plans: "Sequence[MemoryPlan]",
    curves: "Sequence[Sequence[MemoryPlan]]",
    device: str,
    gb: float,
    *,
    curve: bool,
) -> list[str]:
    from node.telemetry.format import table_lines

    head = ["stage", "blocks", "all kept", "planned", "least", "in host memory", "more time", "largest part"]
    rows = [
        [
            str(stage),
            str(len(plan.choices)),
            _gb(points[0].memory.total),
            _gb(plan.memory.total) if plan.fits else "does not fit",
            _gb(points[-1].memory.total),
            _gb(plan.host_bytes) if plan.host_bytes else "nothing",
            f"{plan.added:.1%}",
            _binding(plan),
        ]
        for stage, (plan, points) in enumerate(zip(plans, curves, strict=True))
    ]
    within = f" of {gb:g} GB" if gb else ""
    lines = [f"{len(plans)} stages, each on one {device.upper()}{within}", "", *table_lines(head, rows)]
    for stage, plan in enumerate(plans):
        if done := plan.text():
            lines += ["", f"stage {stage}: {done}"]
    for stage, points in enumerate(curves if curve else ()):
        step = -(-len(points) // MOST_POINTS)
        shown = [*points[::step], *points[-1:]] if (len(points) - 1) % step else points[::step]
        lines += ["", f"stage {stage}:"]
        lines += [
            f"  {_gb(point.memory.total):>9}  +{point.added:5.1%}  {'#' * round(120 * point.added)}".rstrip()
            for point in shown
        ]
    return lines


def _binding(plan: "MemoryPlan") -> str:
    """The largest part of a stage's memory."""
    memory = plan.memory
    parts = {
        "weights and optimizer": memory.state,
        "activations": memory.kept + memory.working,
        "the optimizer's step": memory.applying,
        "process and temporary tensors": memory.fixed,
        "snapshot copies": memory.snapshot,
    }
    return max(parts, key=lambda part: parts[part])


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _as_json(plan: "MemoryPlan") -> dict[str, object]:
    memory = plan.memory
    return {
        "bytes": memory.total,
        "fits": plan.fits,
        "added_time": plan.added,
        "host_bytes": plan.host_bytes,
        "moments_in_host_memory": bool(plan.state.moments),
        "weights_in_host_memory": plan.state.weights,
        "gradients_in_host_memory": plan.state.gradients,
        "codes_in_host_memory": plan.state.codes,
        "cuda_graphs": plan.graphs,
        "blocks": [str(choice) for choice in plan.choices],
        "state": memory.state,
        "pages": memory.pages,
        "kept": memory.kept,
        "working": memory.working,
        "applying": memory.applying,
    }
