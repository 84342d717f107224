"""Measure the cost of tracing: `python -m scripts.bench.trace [--json PATH]`.

Times the executor of one of the demo's stages, in memory without a network, with the spans that it records.
Then times the path of as many spans: recorded, packed for the control connection, read and checked by the
coordinator, written. All times are processor time, so they also hold on a busy machine.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.lab.results import commit, processor
from node.processes.demo import demo_file
from node.run_file.loader import load_config
from node.telemetry.clock import SpanRing
from node.telemetry.trace_files import TraceWriter, segments
from tests.support.memory_pipeline import MemoryPipeline
from wire.messages_proto import node_message_from_proto, node_message_to_proto
from wire.spec import Direction, TensorKey
from wire.telemetry import StepSpans
from wire.v1 import control_pb2

LINK_SPANS = 6
"""Spans of a microbatch on a stage with two neighbours that the executor does not record: tensors sent, in
flight and received, two of each."""
STEPS = 4


def processor_seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def stage_step() -> tuple[float, int]:
    """Processor seconds of a stage's step in the demo, and the spans of a middle stage in it."""
    config = load_config(demo_file(), [])
    rings = [SpanRing() for _ in range(config.pipeline.stages)]
    with MemoryPipeline(config) as pipeline:
        for executor, ring in zip(pipeline.executors, rings, strict=True):
            executor.clock._ring = ring
        pipeline.train(1)
        for ring in rings:
            ring.take()
        seconds = processor_seconds(lambda: pipeline.train(STEPS))
    spans = len(rings[1].take()[0]) // STEPS + LINK_SPANS * config.microbatches
    return seconds / STEPS / config.pipeline.stages, spans


def way_of_spans(count: int, directory: Path) -> dict[str, float]:
    """Seconds and bytes per span."""
    ring = SpanRing()
    keys = [TensorKey(1, 7, number % 8, number % 3, Direction(number % 2)) for number in range(count)]
    kinds = ("forward", "backward", "pack", "unpack", "send", "receive", "wait-upstream")

    def record() -> None:
        for number, key in enumerate(keys):
            at = 1000.0 + number * 1.7e-3
            ring.record(kinds[number % len(kinds)], at, at + 1.3e-3, key, number % 3)

    recorded = processor_seconds(record)
    spans = StepSpans(
        epoch=1, step=7, stage=1, clock_offset=1.7e9, clock_error=1e-4, dropped=0, spans=ring.take()[0]
    )
    packed = b""

    def pack() -> None:
        nonlocal packed
        packed = node_message_to_proto(spans).SerializeToString()

    packing = processor_seconds(pack)
    writer = TraceWriter(directory, 10**9)

    def keep() -> None:
        came = node_message_from_proto(control_pb2.NodeMessage.FromString(packed))
        assert isinstance(came, StepSpans)
        writer.add("node-aaaaaaaaaa", came)
        writer.write(writer.take())

    before = sum(path.stat().st_size for path in segments(directory / "trace"))
    keeping = processor_seconds(keep)
    on_disk = sum(path.stat().st_size for path in segments(directory / "trace")) - before
    return {
        "record_seconds": recorded / count,
        "pack_seconds": packing / count,
        "keep_seconds": keeping / count,
        "wire_bytes": len(packed) / count,
        "disk_bytes": on_disk / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what tracing costs.")
    parser.add_argument("--runs", type=int, default=7, help="runs of which the median counts")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    step_seconds, count = stage_step()
    with tempfile.TemporaryDirectory() as directory:
        runs = [way_of_spans(count, Path(directory)) for _ in range(args.runs + 1)][1:]
    report: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    on_the_node = report["record_seconds"] + report["pack_seconds"]
    report |= {
        "spans_per_step": count,
        "step_seconds": step_seconds,
        "share_of_step": on_the_node * count / step_seconds,
        "runs": args.runs,
        "hardware": processor(),
        "python": platform.python_version(),
        "commit": commit(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
