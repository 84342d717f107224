"""What each stage needs of a device's memory: the estimate by which the coordinator gives stages out.

For a node of one device. What each of several needs depends on how they share a stage: `thinwire doctor
--run-file` says it for the machine at hand.
"""

from dataclasses import dataclass

from node.config.schema import RunConfig
from node.display.render import table_lines
from node.pipeline.device_memory import Devices
from node.pipeline.memory import StageMemory, stage_memory
from node.telemetry.units import bytes_text


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one kind of device."""

    total: int
    state: int
    """Of it weights, gradients and the optimizer's moments, and what a codec remembers."""
    kept: int
    """Of it activations between forward and backward, of all microbatches that the schedule holds."""


@dataclass(frozen=True, kw_only=True)
class StageNeed:
    """What one stage needs, by what its node computes on."""

    gpu: Need
    cpu: Need
    """In main memory snapshots are copied too, and kernels' references make tensors that a GPU's do not."""


def memory_needs(config: RunConfig, windows: int) -> tuple[StageNeed, ...]:
    """Of each stage, first stage first.

    Args:
        windows: samples of one pass over the text, 0 if unknown; they count for a codec with a memory.
    """
    gpu, cpu = (
        stage_memory(config, config.pipeline.stages, Devices(on_cpu=on_cpu), windows=windows)
        for on_cpu in (False, True)
    )
    return tuple(StageNeed(gpu=_need(one), cpu=_need(other)) for one, other in zip(gpu, cpu, strict=True))


def _need(stage: StageMemory) -> Need:
    return Need(total=stage.total, state=stage.state, kept=stage.kept)


def memory_lines(needs: tuple[StageNeed, ...]) -> list[str]:
    """For a terminal; one table where CPUs need the same."""
    alike = all(need.gpu == need.cpu for need in needs)
    parts = ["total", "weights, gradients, optimizer", "kept activations"]
    header = ["stage", *(parts if alike else [f"{kind} {part}" for kind in ("GPU", "CPU") for part in parts])]
    rows = [
        [str(stage), *_cells(need.gpu), *([] if alike else _cells(need.cpu))]
        for stage, need in enumerate(needs)
    ]
    return [
        "a stage needs, as estimated, on a node of one device (of several: thinwire doctor --run-file):",
        *table_lines(header, rows, left=1),
    ]


def _cells(need: Need) -> list[str]:
    return [bytes_text(need.total), bytes_text(need.state), bytes_text(need.kept)]
