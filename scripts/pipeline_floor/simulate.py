"""What the schedule gives by simulation, where nothing else disturbs."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from node.pipeline.floor import LinkRate, Network
from node.pipeline.schedule import Kind, schedule
from node.pipeline.simulation import simulate
from node.pipeline.window_plan import StepMeasures, plan_windows
from pipeline_floor.floor import BACKWARD_SECONDS, FORWARD_SECONDS, STAGES, floor, tensor_bytes


def simulated(arguments: Namespace, shapes: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """What window 0 and the planned windows give under each (round trip, rate), if nothing else happens."""
    found = []
    for round_trip, rate in shapes:
        link = LinkRate(up=rate * 1e6 / 8, down=rate * 1e6 / 8, latency=round_trip / 2e3)
        measures = StepMeasures(
            forward=(FORWARD_SECONDS,) * STAGES,
            backward=(BACKWARD_SECONDS,) * STAGES,
            activation_bytes=tensor_bytes(arguments.codec),
            gradient_bytes=tensor_bytes(arguments.codec),
            links=(link,) * (STAGES - 1),
        )
        planned = plan_windows(
            measures,
            chunks=1,
            microbatches=arguments.microbatches,
            most_held=(arguments.microbatches,) * STAGES,
            current=(),
        )
        for name, windows in (("0", (0,) * (STAGES - 1)), ("auto", planned)):
            seconds = simulate(
                schedule(STAGES, 1, arguments.microbatches, windows),
                FORWARD_SECONDS,
                BACKWARD_SECONDS,
                network=Network(STAGES, measures.links),
                sizes={Kind.FORWARD: measures.activation_bytes, Kind.BACKWARD: measures.gradient_bytes},
                swap=True,
            ).total
            least = floor(arguments, round_trip, rate)
            found.append(
                {
                    "simulated": True,
                    "round_trip_ms": round_trip,
                    "rate_mbit": rate,
                    "window": name,
                    "windows": list(windows),
                    "floor_seconds": least,
                    "step_seconds": [seconds],
                    "share": least / seconds,
                }
            )
    return found
