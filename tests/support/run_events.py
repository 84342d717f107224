"""An invented run as events with times, for tests of displays and analysis."""

from collections.abc import Sequence
from pathlib import Path

from node.telemetry import events
from node.telemetry.clock import TimeKind
from wire.figures import FlowFigures, LinkFigures
from wire.spec import Direction

NODES = ("node-aaaa", "node-bbbb", "node-cccc")
BEGAN = 1_700_000_000.0


def started(
    directory: Path | str = "runs/demo-1", *, first_step: int = 0, steps: int = 100
) -> events.RunStarted:
    return events.RunStarted(
        run_id="demo-abc",
        name="demo",
        directory=str(directory),
        stages=2,
        steps=steps,
        first_step=first_step,
        tokens_per_step=4096,
        forward_codec="fixed-6",
        backward_codec="fixed-8",
        microbatches=8,
        codec_bits={"fp32": 32.03, "fixed-8": 8.26, "fixed-6": 6.26, "fixed-4": 4.26, "tah": 4.42},
    )


def joined(node: str, address: str = "192.0.2.7:4711", *, listens: bool = True) -> events.NodeJoined:
    return events.NodeJoined(node_id=node, device="cpu", address=address, listens=listens)


def placed(epoch: int = 1, nodes: Sequence[str] = NODES[:2], step: int = 0) -> events.PlacementMade:
    return events.PlacementMade(epoch=epoch, nodes=tuple(nodes), resume_step=step, blocks=(4,) * len(nodes))


def stage_cost(stage: int, node: str, seconds: float = 1.0, **shares: float) -> events.StageCost:
    """`shares` of the time by kind, with underscores for hyphens; forward takes the rest."""
    kinds = {kind.value: 0.0 for kind in TimeKind}
    kinds |= {kind.replace("_", "-"): share * seconds for kind, share in shares.items()}
    kinds["forward"] += seconds - sum(kinds.values())
    return events.StageCost(
        stage=stage,
        node_id=node,
        wall_seconds=seconds,
        seconds=kinds,
        memory_bytes=300_000_000,
        peak_memory_bytes=400_000_000,
    )


def link_cost(source: int, target: int, size: int = 1_000_000, capacity: float = 0.0) -> LinkFigures:
    direction, codec, bits = (
        (Direction.ACTIVATION, "fixed-6", 6.26) if source < target else (Direction.GRADIENT, "fixed-8", 8.26)
    )
    return LinkFigures(
        source=source,
        target=target,
        bytes=size,
        flows=(FlowFigures(direction=direction, codec=codec, bytes=size, elements=round(8 * size / bits)),),
        busy_seconds=0.25,
        capacity=capacity,
        round_trip_seconds=0.02,
        retransmits=0,
        rejects=0,
        queued_bytes=0,
    )


def costs(step: int, *, seconds: float = 1.0, aborted: bool = False) -> events.StepCosts:
    return events.StepCosts(
        step=step,
        seconds=seconds,
        aborted=aborted,
        stages=(
            stage_cost(0, NODES[0], seconds, backward=0.4, wait_downstream=0.2),
            stage_cost(1, NODES[1], seconds, backward=0.5, wait_upstream=0.1),
        ),
        links=(link_cost(0, 1, capacity=4e6), link_cost(1, 0, capacity=4e6)),
    )


def done(step: int, *, steps: int = 100, seconds: float = 1.0) -> events.StepDone:
    return events.StepDone(
        step=step,
        steps=steps,
        loss=6.0 - step / 100,
        lr=1e-3,
        grad_norm=0.5,
        seconds=seconds,
        tokens_per_second=4096 / seconds,
        idle=(0.2, 0.1),
        bits_forward=6.26,
        bits_backward=8.26,
        up_mbit=(8.0, 8.0),
        down_mbit=(8.0, 8.0),
    )


def aborted(step: int, epoch: int = 1) -> events.StepAborted:
    reason = "stage 0: the link to stage 1 (node node-bbbb) at 192.0.2.7:4711 was not back within 20 s"
    return events.StepAborted(epoch=epoch, step=step, reason=reason)


def step(number: int) -> list[events.Event]:
    return [costs(number), done(number)]


def history(*groups: Sequence[events.Event] | events.Event) -> list[tuple[float, events.Event]]:
    """Events one second apart."""
    flat: list[events.Event] = []
    for group in groups:
        flat += [group] if isinstance(group, events.Event) else group
    return [(BEGAN + second, event) for second, event in enumerate(flat)]


def opening() -> list[events.Event]:
    """A run of two stages with one spare, up to its first step."""
    return [started(), *(joined(node) for node in NODES), placed()]
