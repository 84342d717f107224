"""Prints the progress of a run from the coordinator's events.

There are three renderers: JSON lines (`--json`), plain lines (if the output is not a terminal; no escapes,
about one line per second), and a live display. All end with the same summary. Results go to stdout, logs to
stderr.
"""

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from node.display.terminal import lasting
from node.telemetry.events import (
    Event,
    JoinLine,
    NodeJoined,
    PageServed,
    PlacementMade,
    RunFinished,
    RunStarted,
    RunSummary,
    SnapshotStored,
    StepDone,
    text_of,
)
from node.telemetry.format import (
    NO_LABELS,
    bytes_text,
    count_text,
    counted,
    duration_text,
    loss_text,
    named,
    printable,
    table_lines,
)

if TYPE_CHECKING:
    from rich.console import Group

PLAIN_INTERVAL = 1.0
"""The least seconds between step lines of the plain renderer."""
FRAME_INTERVAL = 0.1
"""The least seconds between frames of the live display."""
SHORT_ID = 15
"""How many characters of a node id to show."""


class Renderer(Protocol):
    """A context manager that is called with each event. Leaving it restores the terminal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __call__(self, event: Event) -> None: ...


def make_renderer(*, json: bool, stream: TextIO | None = None) -> Renderer:
    """JSON lines if requested, the live display on a terminal, else plain lines.

    If the stream becomes unwritable, this is logged once and further output is dropped.
    """
    stream = lasting(stream or sys.stdout)
    if json:
        return JsonRenderer(stream)
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return LiveRenderer(stream)
    return PlainRenderer(stream)


class JsonRenderer(Renderer):
    """Prints each event as one JSON line, flushed at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: Event) -> None:
        self._stream.write(event.to_json() + "\n")
        self._stream.flush()


class PlainRenderer(Renderer):
    """Prints one line per event, but for steps only the first, the last, and one per `PLAIN_INTERVAL`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._pace = Pace()
        self._names: dict[str, str] = {}
        self._next_step_line = -1.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._pace.add(event)
            now = self._clock()
            if now < self._next_step_line and event.step != event.steps:
                return
            self._next_step_line = now + PLAIN_INTERVAL
            lines = [step_line(event, self._pace)]
        else:
            _note_name(self._names, event)
            lines = event_lines(event, self._names)
        self._stream.write("".join(line + "\n" for line in lines))
        self._stream.flush()


class LiveRenderer(Renderer):
    """Shows progress and a row per stage, redrawn in place. Other events scroll above. Needs a terminal."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        # Rich itself honours NO_COLOR.
        self._console = Console(file=stream, markup=False, emoji=False, highlight=False)
        # If stderr is a terminal, log lines go above the display.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._clock = clock
        self._next_frame = 0.0
        self._pace = Pace()
        self._nodes: tuple[str, ...] = ()
        self._names: dict[str, str] = {}
        self._across = 0
        self._figures: StepDone | None = None
        """The newest step with figures of its stages."""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._pace.add(event)
            now = self._clock()
            if now >= self._next_frame or event.step == event.steps:
                self._next_frame = now + FRAME_INTERVAL
                self._live.update(self._display(event), refresh=True)
            return
        if isinstance(event, PlacementMade):
            self._nodes, self._across, self._figures = event.nodes, event.stages, None
        if isinstance(event, RunFinished):
            self._live.stop()  # the last frame stays, and the summary follows
        _note_name(self._names, event)
        for line in event_lines(event, self._names):
            # Unwrapped, so that a join line can be copied.
            self._console.print(line, soft_wrap=True)

    def _display(self, done: StepDone) -> "Group":
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Text.assemble(
            (f"step {done.step}/{done.steps}", "bold"),
            f"   loss {loss_text(done.loss)}   {count_text(done.tokens_per_second)} tokens/s   ",
            f"{_bits(done)}   lr {done.lr:.2e}   grad norm {done.grad_norm:.3g}   eta {self._pace.eta(done)}",
        )
        if done.idle:
            self._figures = done
        header, rows = stage_rows(self._figures or done, self._nodes, self._across)
        table = Table(*header[:2], box=None, pad_edge=False)
        for name in header[2:]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row)
        bar = ProgressBar(total=done.steps, completed=done.step, complete_style="green")
        # Padding adds the line break that the bar lacks.
        return Group(head, Padding(bar, 0), table)


def _note_name(names: dict[str, str], event: Event) -> None:
    """Remember the name of a node that joins."""
    if isinstance(event, NodeJoined):
        names[event.node_id] = event.name


class Pace:
    """The median time of the newest steps, which ignores steps that compiled or recovered."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=15)

    def add(self, done: StepDone) -> None:
        self._newest.append(done.seconds)

    def eta(self, done: StepDone) -> str:
        return duration_text((done.steps - done.step) * statistics.median_low(self._newest or (0.0,)))


def step_line(done: StepDone, pace: Pace) -> str:
    return "   ".join(
        (
            f"step {done.step}/{done.steps}",
            f"loss {loss_text(done.loss)}",
            f"{count_text(done.tokens_per_second)} tokens/s",
            f"idle {_by_stage([100 * share for share in done.idle], '%')}",
            f"up {_by_stage(done.up_mbit, ' Mbit/s')}",
            _bits(done),
            f"eta {pace.eta(done)}",
        )
    )


def event_lines(event: Event, names: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Any event except steps, as plain lines. `names`: the nodes' names, by node id."""

    def shown(node_id: str) -> str:
        return named(node_id[:SHORT_ID], names.get(node_id, ""))

    match event:
        case RunStarted():
            resumed = f", from step {event.first_step}" if event.first_step else ""
            return [
                printable(
                    f"run {event.name} ({event.run_id}) in {event.directory}: "
                    f"{counted(event.stages, 'stage')}, {counted(event.steps, 'step')}{resumed}, "
                    f"{count_text(event.tokens_per_step)} tokens per step, "
                    f"activations {event.forward_codec}, gradients {event.backward_codec}"
                )
            ]
        case JoinLine():
            return ["join with:", "", f"  {printable(event.line)}", ""]
        case PageServed():
            changes = f"changes there need the key in {event.key_file}" if event.key_file else "read-only"
            return [printable(f"page at {event.url} ({changes})")]
        case RunFinished():
            return finished_lines(event)
    text = text_of(event, shown)
    if isinstance(event, NodeJoined):
        where = f"at {event.address}" if event.address else "through a relay: neighbours cannot dial it"
        text = f"{text} {where}"
    elif isinstance(event, SnapshotStored):
        text = f"{text} in {event.path}"
    return [] if text is None else [printable(text)]


def finished_lines(event: RunFinished) -> list[str]:
    lines = ["", printable(str(text_of(event, str)))]
    lines += summary_lines(event.summary) if event.summary else []
    return [*lines, printable(f"continue with: {event.resume}")] if event.resume else lines


def summary_lines(summary: RunSummary) -> list[str]:
    """The summary: loss, speed, bytes compared with FP32 and BF16, bits per element, time by stage."""
    since = f" since step {summary.since}" if summary.since else ""
    again = f", {summary.again} of them again" if summary.again else ""
    lines = [
        f"steps       {summary.steps}{since}{again}, {count_text(summary.tokens)} tokens in "
        f"{duration_text(summary.seconds)}, {count_text(summary.tokens_per_second)} tokens/s",
        "loss        "
        + (
            NO_LABELS
            if math.isnan(summary.last_loss)
            else f"{loss_text(summary.first_loss)} first, {loss_text(summary.last_loss)} last"
        ),
    ]
    if summary.link_bytes:
        lines += [
            f"on the wire {bytes_text(summary.link_bytes)}; "
            f"FP32 takes {_against(summary.link_bytes_fp32, summary.link_bytes)}, "
            f"BF16 {_against(summary.link_bytes_bf16, summary.link_bytes)}",
            f"bits        {summary.bits_forward:.2f} per activation element, "
            f"{summary.bits_backward:.2f} per gradient element, headers included",
        ]
    if summary.held_out_bytes:
        lines.append(f"held out    {bytes_text(summary.held_out_bytes)} more on the wire")
    if summary.snapshot_path:
        lines.append(printable(f"snapshot    {summary.snapshot_path}"))
    if summary.weights_sha256:
        lines.append(printable(f"weights     sha256 {summary.weights_sha256}"))
    if summary.machines:
        lines.append(printable(f"thanks to   {', '.join(summary.machines)}"))
    return lines + _time_lines(summary)


def _time_lines(summary: RunSummary) -> list[str]:
    """Each stage's wall time by kind, in percent."""
    kinds = list(dict.fromkeys(kind for stage in summary.stages for kind in stage.seconds))
    if not kinds:
        return []
    is_grid = any(stage.replica for stage in summary.stages)
    header = [
        "row/stage" if is_grid else "stage",
        "node",
        *(printable(kind).replace("stream", "") for kind in kinds),
        "seconds",
    ]
    rows = [
        [
            f"{stage.replica}/{stage.stage}" if is_grid else str(stage.stage),
            printable(stage.node_id[:SHORT_ID]),
            *(_percent(stage.seconds.get(kind, 0.0), stage.wall_seconds) for kind in kinds),
            f"{stage.wall_seconds:.1f}",
        ]
        for stage in summary.stages
    ]
    return ["where time went, % of each stage's wall time:", *table_lines(header, rows)]


def stage_rows(done: StepDone, nodes: tuple[str, ...], across: int = 0) -> tuple[list[str], list[list[str]]]:
    """A header and one row per stage, with idle share and traffic of one step.

    `across`: the number of stages in a row of the grid; 0 for a grid of one row.
    """
    rows = []
    is_grid = 0 < across < len(done.idle)
    for stage, (idle, up, down) in enumerate(zip(done.idle, done.up_mbit, done.down_mbit, strict=True)):
        node = printable(nodes[stage][:SHORT_ID]) if stage < len(nodes) else ""
        place = f"{stage // across}/{stage % across}" if is_grid else str(stage)
        rows.append([place, node, f"{idle:.0%}", f"{up:.1f}", f"{down:.1f}"])
    return ["row/stage" if is_grid else "stage", "node", "idle", "up Mbit/s", "down Mbit/s"], rows


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _against(other: int, sent: int) -> str:
    return f"{bytes_text(other)} ({other / sent:.1f}x)"


def _bits(done: StepDone) -> str:
    """Bits per element on the links, if there are any."""
    if len(done.idle) == 1:
        return "no links"
    return f"bits {done.bits_forward:.2f} out, {done.bits_backward:.2f} back"


def _by_stage(values: list[float] | tuple[float, ...], unit: str) -> str:
    """Each stage's value if they fit on a line, else their range."""
    if not values:
        return "-"
    if len(values) <= 8:
        return "/".join(f"{value:.0f}" for value in values) + unit
    return f"{min(values):.0f} to {max(values):.0f}{unit}"
