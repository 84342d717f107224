"""What a thousand members cost the coordinator, without a network: `python -m scripts.bench.member_costs`.

Processor time, in one process, of what the coordinator does itself: parse a heartbeat and keep it, take all
reports of a step and sum it up, write `/metrics`; and the bytes of a placement. gRPC, TLS and sockets come on
top. The least of a few repetitions counts, so that other work on the machine counts little.

`metrics` times the text alone, which a thread writes: all reports are decoded, and the view is there.
A `scrape` times everything: each node has sent a newer report, and the view is old.

A `block` is the longest time for which one of these keeps the event loop: of the view of a run after `STEPS`
steps, of the same as plain values, its JSON, and of what a `scrape` takes from the run.
"""

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.coordinator.metrics import RunMetrics
from node.coordinator.reporter import Reporter
from node.coordinator.reports import NO_REPORT, longest_kind
from node.dashboard.feed import Feed, json_of
from node.lab.results import commit, hardware
from node.processes.cycles import short_collections
from node.run_state.actions import RecordCommit, RecordRestored, Send
from node.run_state.epoch import Assignment, Epoch, OnRecord, StepRules
from node.run_state.votes import VoteHistory
from node.telemetry import events
from node.telemetry.clock import TimeKind
from node.view.view_builder import RunViewBuilder
from scripts.report import RESULTS
from wire.figures import FlowFigures, LinkFigures
from wire.messages import Heartbeat
from wire.messages_proto import (
    coordinator_message_to_proto,
    node_message_from_proto,
    node_message_to_proto,
)
from wire.spec import Direction
from wire.telemetry import DIRECT, Telemetry
from wire.v1 import control_pb2

OUT = RESULTS / "member_costs.json"
STAGES, ROWS, REPEATS, STEPS = 250, 4, 5, 12
GROUPS = tuple((row,) for row in range(ROWS))
HOSTS = tuple(f"node-{number:010d}" for number in range(STAGES * ROWS))
TENSORS = 4096
"""Bytes of a step on each link."""


def telemetry(number: int, steps: int) -> Telemetry:
    """Of an ordinary stage after so many steps of a second."""
    row, stage = divmod(number, STAGES)

    def link(peer: int) -> LinkFigures:
        flow = FlowFigures(
            direction=Direction.ACTIVATION if peer > stage else Direction.GRADIENT,
            codec="fp32",
            bytes=steps * TENSORS,
            elements=steps * TENSORS // 4,
        )
        return LinkFigures(
            target=peer,
            bytes=steps * TENSORS,
            bytes_received=steps * TENSORS,
            retransmits=0,
            rejects=0,
            round_trip_seconds=0.02,
            capacity=1e7,
            flows=(flow,),
            target_replica=row,
            path=DIRECT,
        )

    return Telemetry(
        epoch=1,
        seconds={kind.value: steps / len(TimeKind) for kind in TimeKind},
        wall_seconds=float(steps),
        links=tuple(link(peer) for peer in (stage - 1, stage + 1) if 0 <= peer < STAGES),
        memory_bytes=10**8,
    )


class Run:
    """A run whose members report, and what is made of it."""

    def __init__(self, *before: events.Event) -> None:
        """`before`: what happens first."""
        self.view = RunViewBuilder()
        for event in before:
            self.view.apply(event, 1.0)
        config = RunConfig(
            model=ModelSection(layers=STAGES, hidden=16, heads=2, kv_heads=2, ffn=32, vocab=256, sequence=16),
            training=TrainingSection(global_batch=2 * ROWS, microbatch=1),
            pipeline=PipelineSection(
                stages=STAGES, groups=ROWS, forward_codec="fp32", backward_codec="fp32", window=0
            ),
        )
        self.metrics = RunMetrics(lambda: Feed(self.view).view())
        self.reporter = Reporter(config, lambda event: self.view.apply(event, 1.0))
        self.metrics.accounting = self.reporter.accounting
        self.step = 0
        for node in HOSTS:
            self.view.apply(events.NodeJoined(node_id=node, device="cpu", address="10.0.0.1:7700"), 1.0)
        self.reporter.placed()
        self.report(0)
        self.reporter.restored(RecordRestored(epoch=1, step=0, nodes=HOSTS, groups=GROUPS), {})

    def report(self, steps: int) -> None:
        for number, node in enumerate(HOSTS):
            self.said(node, telemetry(number, steps))

    def said(self, node: str, report: Telemetry) -> None:
        accounting = self.reporter.accounting
        longest_kind(accounting.newest.get(node, NO_REPORT), report)
        accounting.report(node, report, self.reporter.epoch_seconds)

    def heartbeats(self, packed: list[bytes]) -> None:
        """As they come from the network."""
        for node, data in zip(HOSTS, packed, strict=True):
            message = node_message_from_proto(control_pb2.NodeMessage.FromString(data))
            assert isinstance(message, Heartbeat)
            self.said(node, message.telemetry)

    def finish(self) -> None:
        """The step that runs is done; its events are shown."""
        norms = RecordCommit(
            epoch=1, step=self.step, loss=1.0, grad_norm=1.0, lr=1.0, clip_coefficient=1.0, norms={}
        )
        self.reporter.committed(norms)
        self.reporter.finish_step()
        self.step += 1


def placement_bytes() -> int:
    """Of the placements of one epoch, all together."""
    assignment = Assignment(
        hosts=HOSTS,
        addresses=tuple(f"10.0.{number // 250}.{number % 250}:7700" for number in range(len(HOSTS))),
        groups=GROUPS,
    )
    rules = StepRules(
        plan=lambda step, norm: (1.0, 1.0),
        neighbours=lambda stage, stages: {stage - 1, stage + 1} & set(range(stages)),
        history=VoteHistory(lambda stages: [frozenset()] * stages),
    )
    epoch = Epoch(1, assignment, OnRecord(), rules)
    sent = [one.message for one in epoch.announce() if isinstance(one, Send)]
    return sum(coordinator_message_to_proto(message).ByteSize() for message in sent)


def spent(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def blocks() -> dict[str, float]:
    """The median of a few repetitions, collections of cycles included. Advice takes longest: it rests on many
    steps."""
    started = events.RunStarted(
        run_id="run",
        name="run",
        directory="run",
        stages=STAGES,
        steps=STEPS + REPEATS,
        first_step=0,
        tokens_per_step=2 * ROWS * 16,
        forward_codec="fp32",
        backward_codec="fp32",
    )
    run = Run(started)
    found: dict[str, list[float]] = {one: [] for one in ("view", "values", "json", "scrape")}
    for step in range(1, STEPS + REPEATS):
        run.report(step)
        run.finish()
        if step < STEPS:
            continue
        view = run.view.view()
        found["view"].append(spent(run.view.view))
        found["values"].append(spent(view.to_fields))
        values = view.to_fields()
        found["json"].append(spent(lambda values=values: json_of(values)))
        # Nodes have sent what is counted for it.
        run.report(step + 1)
        found["scrape"].append(spent(lambda view=view: run.metrics.scrape(view)))
    # A thread makes all but the values of a scrape.
    return {
        f"{what}_{'block' if what == 'scrape' else 'thread'}_seconds": statistics.median(times)
        for what, times in found.items()
    }


def measure() -> dict[str, Any]:
    found: dict[str, list[float]] = {one: [] for one in ("heartbeat", "step", "metrics", "scrape")}
    with short_collections():
        found_blocks = blocks()
    run = Run()
    for repeat in range(REPEATS):
        steps = 4 * repeat + 1
        packed = [
            node_message_to_proto(Heartbeat(telemetry=telemetry(n, steps), sent_at=1.0)).SerializeToString()
            for n in range(len(HOSTS))
        ]
        found["heartbeat"].append(spent(lambda packed=packed: run.heartbeats(packed)) / len(HOSTS))
        reports = [telemetry(number, steps + 1) for number in range(len(HOSTS))]

        def step(reports: list[Telemetry] = reports) -> None:
            for node, one in zip(HOSTS, reports, strict=True):
                run.said(node, replace(one))
            run.finish()

        found["step"].append(spent(step))
        found["metrics"].append(spent(run.metrics.scrape(run.view.view()).text))
        run.report(steps + 2)
        found["scrape"].append(spent(lambda: asyncio.run(run.metrics.render())))
    return {
        "commit": commit(),
        "hardware": hardware(),
        "members": len(HOSTS),
        **found_blocks,
        **{f"{what}_seconds": min(times) for what, times in found.items()},
        "placement_bytes": placement_bytes(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What a thousand members cost the coordinator itself.")
    parser.add_argument("--add", action="store_true", help="after the file's results, of other commits")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    before = json.loads(arguments.out.read_text()) if arguments.add else {}
    runs = before.get("runs", [])
    report = {
        "hardware": before.get("hardware", hardware()),
        "python": platform.python_version(),
        "stages": STAGES,
        "rows": ROWS,
        "repeats": REPEATS,
        "runs": [*runs, measure()],
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["runs"][-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
