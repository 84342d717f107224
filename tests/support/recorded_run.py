"""The history of an invented run on disk, as a coordinator would have left it: for tests of the page.

Four stages, a slow link between 1 and 2, a node that dies and a spare that takes over, two snapshots. One
node has given itself a device name that would be HTML if a page let it, and so has the model said.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection
from node.coordinator.store import Store
from node.run_file.loader import to_json
from node.telemetry import events
from node.telemetry.clock import TimeKind
from node.telemetry.history import HISTORY_FILE
from wire.figures import FlowFigures, LinkFigures
from wire.spec import Direction

HOSTILE = '<img src=x onerror="document.title=`owned`"><script>document.title="owned"</script>'
SAMPLES = (
    ("Once upon a time", "there was a house by the sea, and nobody in it.\nThe door stood open."),
    ("<b>The captain</b>", HOSTILE),
)
NODES = ("node-aaaaaaaaaa", "node-bbbbbbbbbb", "node-cccccccccc", "node-dddddddddd", "node-eeeeeeeeee")
BEGAN = 1_763_700_000.0
STEPS = 400
TOKENS = 65_536


def write_run(directory: Path, *, steps_done: int = 268, stages: int = 4, ended: bool = False) -> None:
    """A run's directory: database and history. The history stops after `steps_done` steps."""
    config = RunConfig(
        run=RunSection(name="books", steps=STEPS),
        model=ModelSection(layers=6 * stages),
        pipeline=PipelineSection(stages=stages, forward_codec="tah", backward_codec="fixed-6"),
    )
    with Store.create(
        directory, run_id="books-k3m7p", config_json=to_json(config), pin=b"p" * 32, now=BEGAN
    ) as store:
        store.set_addresses(["127.0.0.1:7700"])
    with (directory / HISTORY_FILE).open("w", encoding="utf-8") as file:
        for at, event in _happenings(steps_done, stages, ended):
            line = {"at": round(at, 3), **json.loads(event.to_json())}
            file.write(json.dumps(line) + "\n")


def append(directory: Path, at: float, event: events.Event) -> None:
    """One more line, as the run goes on."""
    with (directory / HISTORY_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at": at, **json.loads(event.to_json())}) + "\n")


def step(number: int, stages: int = 4) -> list[events.Event]:
    """The events of one step."""
    seconds = 4.1 + 0.4 * math.sin(number / 7) + (2.5 if number % 61 == 0 else 0.0)
    return [_costs(number, stages, seconds), _done(number, stages, seconds)]


def _happenings(steps_done: int, stages: int, ended: bool) -> Iterator[tuple[float, events.Event]]:
    at = BEGAN
    names = [*NODES[: min(stages, 4)], *(f"node-{chr(102 + i) * 10}" for i in range(stages - 4))]
    yield (
        at,
        events.RunStarted(
            run_id="books-k3m7p",
            name="books",
            directory="runs/books-1",
            stages=stages,
            steps=STEPS,
            first_step=0,
            tokens_per_step=TOKENS,
            forward_codec="tah",
            backward_codec="fixed-6",
            microbatches=16,
            codec_bits={"fp32": 32.03, "fixed-8": 8.26, "fixed-6": 6.26, "fixed-4": 4.26, "tah": 4.42},
        ),
    )
    for node in [*names, NODES[4]]:
        at += 3.0
        device = HOSTILE if node == NODES[3] else "NVIDIA GeForce RTX 4090"
        yield at, events.NodeJoined(node_id=node, device=device, address="192.0.2.7:4711")
    blocks = (6,) * stages
    yield at + 4, events.PlacementMade(epoch=1, nodes=tuple(names), resume_step=0, blocks=blocks)
    at += 5
    for number in range(1, steps_done + 1):
        costs, done = step(number, stages)
        assert isinstance(done, events.StepDone)
        at += done.seconds
        yield at, costs
        yield at, done
        if number % 40 == 0:
            held_out = 3.0 + 3.0 * math.exp(-number / 60) + number / 250
            yield at, _held_out(number, held_out, best=number <= 160)
        if number in (100, 200):
            yield at + 1, events.SnapshotStored(step=number, bytes=1_492_000_000, path="x")
            for prompt, text in SAMPLES:
                yield at + 2, events.SampleMade(step=number, prompt=prompt, text=f"{text} ({number})")
        if number == 140:
            reason = "its connection closed and did not come back"
            lost = min(2, stages - 1)
            yield at + 2, events.NodeLeft(node_id=names[lost], reason=reason)
            gone = f"node {names[lost]} is gone: {reason}"
            yield at + 2, events.StepAborted(epoch=1, step=141, reason=gone)
            names[lost] = NODES[4]
            yield at + 9, events.PlacementMade(epoch=2, nodes=tuple(names), resume_step=140, blocks=blocks)
            yield at + 9, events.Recovered(text="back at step 140 within 7 s", step=140, seconds=7.0)
            at += 9
    yield at + 1, events.NodeJoined(node_id="node-zzzzzzzzzz", device="cpu", address="192.0.2.9:4711")
    if ended:
        yield at + 3, events.RunFinished(reason="all steps are done", failed=False)


def _held_out(number: int, loss: float, *, best: bool) -> events.HeldOutLoss:
    return events.HeldOutLoss(
        step=number, loss=loss + 0.01, uncompressed=loss, samples=64, best=best, seconds=2.0
    )


def _done(number: int, stages: int, seconds: float) -> events.StepDone:
    noise = 0.05 * math.sin(3.1 * number) + 0.04 * math.sin(1.7 * number + 1)
    return events.StepDone(
        step=number,
        steps=STEPS,
        loss=2.9 + 3.1 * math.exp(-number / 60) + noise,
        lr=3e-4 * min(1.0, number / 40),
        grad_norm=0.8,
        seconds=seconds,
        tokens_per_second=TOKENS / seconds,
        idle=(0.4,) * stages,
        bits_forward=4.42,
        bits_backward=6.26,
        up_mbit=(40.0,) * stages,
        down_mbit=(40.0,) * stages,
    )


def _costs(number: int, stages: int, seconds: float) -> events.StepCosts:
    return events.StepCosts(
        step=number,
        seconds=seconds,
        aborted=False,
        stages=tuple(_stage(stage, stages, seconds) for stage in range(stages)),
        links=tuple(
            _link(source, target, seconds)
            for left in range(stages - 1)
            for source, target in ((left, left + 1), (left + 1, left))
        ),
    )


def _stage(stage: int, stages: int, seconds: float) -> events.StageCost:
    early = stage < stages // 2
    shares = dict.fromkeys(TimeKind, 0.0) | {
        TimeKind.FORWARD: 0.13,
        TimeKind.BACKWARD: 0.27,
        TimeKind.ENCODE: 0.03,
        TimeKind.DECODE: 0.02,
        TimeKind.OPTIMIZER: 0.02,
        TimeKind.WAIT_UPSTREAM: 0.06 if early else 0.44,
        TimeKind.WAIT_DOWNSTREAM: 0.44 if early else 0.06,
    }
    shares[TimeKind.WAIT_COORDINATOR] = 1 - sum(shares.values())
    return events.StageCost(
        stage=stage,
        node_id=NODES[stage] if stage < 5 else "",
        wall_seconds=seconds,
        seconds={kind.value: share * seconds for kind, share in shares.items()},
        memory_bytes=2_400_000_000,
        peak_memory_bytes=2_900_000_000,
        gpu_memory_bytes=11_300_000_000,
        gpu_peak_memory_bytes=14_900_000_000,
    )


def _link(source: int, target: int, seconds: float) -> LinkFigures:
    slow = {source, target} == {1, 2}
    capacity, use = (12.5e6, 0.96 if source < target else 0.81) if slow else (62.5e6, 0.19)
    direction, codec, bits = (
        (Direction.ACTIVATION, "tah", 4.42) if source < target else (Direction.GRADIENT, "fixed-6", 6.26)
    )
    size = round(capacity * use * seconds)
    flow = FlowFigures(direction=direction, codec=codec, bytes=size, elements=round(8 * size / bits))
    return LinkFigures(
        source=source,
        target=target,
        bytes=size,
        flows=(flow,),
        busy_seconds=use * seconds,
        capacity=capacity,
        round_trip_seconds=0.0214 if slow else 0.0083,
        retransmits=1 if slow and source < target and round(seconds * 100) % 29 == 0 else 0,
        rejects=0,
        queued_bytes=0,
    )
