"""What a node has reported after some steps, as telemetry."""

from wire.figures import FlowFigures, LinkFigures
from wire.spec import Direction
from wire.telemetry import Telemetry

EPOCH = 3


def totals(
    steps: float, *, stage: int = 0, epoch: int = EPOCH, codec: str = "tah", rejects: int = 0
) -> Telemetry:
    """The telemetry of one of two stages after `steps` steps: 2 s each, a quarter of it waiting."""
    direction = Direction.ACTIVATION if stage == 0 else Direction.GRADIENT
    return Telemetry(
        epoch=epoch,
        seconds={"forward": 1.0 * steps, "backward": 0.5 * steps, "wait-upstream": 0.5 * steps},
        wall_seconds=2.0 * steps,
        links=(
            LinkFigures(
                target=1 - stage,
                bytes=round(1000 * steps),
                bytes_received=round(1000 * steps),
                retransmits=round(2 * steps),
                rejects=rejects,
                round_trip_seconds=0.01,
                capacity=5000.0,
                busy_seconds=0.5 * steps,
                queued_bytes=7,
                flows=(
                    FlowFigures(
                        direction=direction,
                        codec=codec,
                        bytes=round(900 * steps),
                        elements=round(1600 * steps),
                    ),
                ),
            ),
        ),
        memory_bytes=5000,
        peak_memory_bytes=6000,
    )
