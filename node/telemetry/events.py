"""Typed events of a run, in one stream from the coordinator.

All displays of a run (JSON lines, plain text, live display, `thinwire status`, the page) depend only on
events. In JSON an event is one object: `event` names its kind, and the other keys are its fields.
"""

import json
import shlex
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import EnumType
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Union, cast, get_args, get_origin, get_type_hints

from node.telemetry.format import NO_LABELS, bytes_text, dropped_text
from wire.errors import ProtocolViolationError
from wire.figures import Figures, LinkFigures, StageFigures

_KINDS: dict[str, type["Event"]] = {}


@dataclass(frozen=True, kw_only=True)
class Event:
    event: ClassVar[str]
    """The kind in JSON."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.event] = cls

    def to_json(self) -> str:
        """One line of ASCII, without the newline. NaN and infinities (a diverged loss) become null."""
        return _dumps({"event": self.event, **vars(self)})

    def to_line(self, **first: object) -> str:
        """`to_json` without spaces, after these fields."""
        return _dumps({**first, "event": self.event, **vars(self)}, (",", ":"))


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The coordinator has opened the run, from scratch or resumed at `first_step`."""

    event: ClassVar[str] = "run-started"
    run_id: str
    name: str
    directory: str
    stages: int
    steps: int
    first_step: int
    tokens_per_step: int
    forward_codec: str
    backward_codec: str
    microbatches: int = 0
    """Microbatches per step; 0 if unknown."""
    chunks: int = 1
    """Model chunks per stage."""
    slices: int = 1
    """The parts into which each microbatch is cut along the sequence."""
    head_share: float | None = None
    """The share of the first stage's compute that a tied model's head takes there; None if the head is on the
    last stage."""
    codec_bits: Mapping[str, float] = field(default_factory=dict)
    """The bits per element of each codec on this run's links, including headers and frames. Readers use them
    to estimate the gain of another codec."""
    ends_in_blocks: tuple[float, ...] = ()
    """The compute cost of the embedding and of the head, in blocks; empty if unknown."""
    host: str = ""
    """The coordinator's machine."""
    process_id: int = 0
    process_start: str = ""
    """Distinguishes the coordinator's process from a later one with the same id; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class JoinLine(Event):
    """The command that a volunteer pastes. It contains a secret and is never stored."""

    event: ClassVar[str] = "join-line"
    line: str


@dataclass(frozen=True, kw_only=True)
class TokenUses(Event):
    """How many nodes the run's join tokens still admit. It is sent when the number changes."""

    event: ClassVar[str] = "token-uses"
    left: int


@dataclass(frozen=True, kw_only=True)
class PageServed(Event):
    """The run's page is served."""

    event: ClassVar[str] = "page"
    url: str
    key_file: str
    """The file with the operator's key, which is needed for changes on the page; empty if the page is
    read-only."""


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Event):
    event: ClassVar[str] = "node-joined"
    node_id: str
    device: str
    address: str
    """The address that neighbours dial; empty if they cannot dial it."""
    name: str = ""
    """The owner's name for it; may be empty."""
    listens: bool = True
    """Whether it opens a port for neighbours."""


LEFT = "it left"
"""The reason of a node that asked to leave."""
QUARANTINED = "quarantined: "
"""The beginning of the reason of a node that the run shut out."""


@dataclass(frozen=True, kw_only=True)
class NodeLeft(Event):
    event: ClassVar[str] = "node-left"
    node_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PlacementMade(Event):
    """A new epoch: the node of each stage, and the step from which the run continues."""

    event: ClassVar[str] = "placement"
    epoch: int
    nodes: tuple[str, ...]
    """The node ids by stage, row after row if there are several; "" for an empty seat."""
    resume_step: int
    blocks: tuple[int, ...] = ()
    """The number of transformer blocks by stage."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The gradient groups of each row; empty for a run with one group, which has one row."""

    @property
    def stages(self) -> int:
        """The number of stages of a row."""
        return len(self.nodes) // max(1, len(self.groups))

    @property
    def placed(self) -> str:
        """Which node is in which seat, for display."""
        stages = self.stages
        rows = [self.nodes[first : first + stages] for first in range(0, len(self.nodes), max(1, stages))]
        texts = [", ".join(f"{stage} {node or 'nobody'}" for stage, node in enumerate(row)) for row in rows]
        if len(texts) < 2:
            return "".join(texts)
        shares = [f"{len(run)} group{'s' if len(run) > 1 else ''}" for run in self.groups]
        return "; ".join(
            f"row {row} ({share}): {text}"
            for row, (share, text) in enumerate(zip(shares, texts, strict=True))
        )


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """A committed step. Tuples are by stage, row after row if there are several."""

    event: ClassVar[str] = "step"
    step: int
    """The number of steps done so far, including this one: the first is 1, the last equals `steps`."""
    steps: int
    loss: float
    """The mean cross-entropy over the step's labels, in nats per token; NaN (null in JSON) without labels."""
    lr: float
    grad_norm: float
    """The gradient norm before clipping, over the whole model."""
    seconds: float
    tokens_per_second: float
    idle: tuple[float, ...]
    """The share of the step that each stage waited, from 0 to 1. All tuples here are empty if the costs of
    this step are summed with those of later ones; other cost figures are then those of the newest sum."""
    bits_forward: float
    """The bits per activation element on the wire in this step, for payload and headers."""
    bits_backward: float
    """The bits per gradient element on the wire in this step, for payload and headers."""
    up_mbit: tuple[float, ...]
    """The Mbit/s that each stage sent over the step."""
    down_mbit: tuple[float, ...]
    """The Mbit/s that each stage received over the step."""


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss(Event):
    """The mean loss over held-out samples with the state of a step, in nats per token."""

    event: ClassVar[str] = "held-out"
    step: int
    loss: float | None
    """The loss with the run's codecs on the links; None if they cannot carry such samples, or without
    labels."""
    uncompressed: float
    """The loss with fp32 on every link; NaN without labels."""
    samples: int
    """The number of samples with labels."""
    best: bool
    """Whether it is the least uncompressed loss so far."""
    seconds: float
    """The wall time of the measurement."""

    @property
    def line(self) -> str:
        trained = "" if self.loss is None else f", {self.loss:.4f} as trained"
        best = ", the best so far" if self.best else ""
        result = f"{self.uncompressed:.4f} uncompressed{trained}{best}" if self.samples else NO_LABELS
        return f"held-out loss at step {self.step}: {result}"


@dataclass(frozen=True, kw_only=True)
class SampleMade(Event):
    """The text that a snapshot's model added to one of `data.prompts`."""

    event: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str
    """It may be any text, so escape it."""

    @property
    def line(self) -> str:
        return f"sample of step {self.step}: {self.prompt} | {self.text}"


@dataclass(frozen=True, kw_only=True)
class TaskScores(Event):
    """The result of lm-eval for a snapshot's model."""

    event: ClassVar[str] = "task-scores"
    step: int
    limit: int
    """The most questions of each task; 0 for all."""
    scores: Mapping[str, Mapping[str, float]]
    """lm-eval's metrics by task. Standard errors have `_stderr` in their names."""

    @property
    def line(self) -> str:
        """Each task's metrics with their standard errors in one line, for display."""
        tasks = []
        for task, metrics in self.scores.items():
            words = []
            for name, value in metrics.items():
                metric, comma, kind = name.partition(",")
                error = metrics.get(f"{metric}_stderr{comma}{kind}")
                if not metric.endswith("_stderr"):
                    words.append(f"{name} {value:.4g}" + ("" if error is None else f" ± {error:.2g}"))
            tasks.append(f"{task} {', '.join(words)}")
        few = f" ({self.limit} questions each)" if self.limit else ""
        return f"lm-eval at step {self.step}{few}: {'; '.join(tasks)}"


@dataclass(frozen=True, kw_only=True)
class StageCost(StageFigures):
    """The cost of one stage of a run, and the node that hosted it."""

    stage: int
    node_id: str
    replica: int = 0
    """The row of the grid."""


@dataclass(frozen=True, kw_only=True)
class StepCosts(Event):
    """The cost of a step by stage and link. It comes just before the step's `StepDone` or `StepAborted`.

    If the next step began with the commit, the figures are those that came with the votes. What a stage wrote
    after its vote, and the optimizer's time, then count with the next step.

    Short steps may come as one sum.
    """

    event: ClassVar[str] = "step-costs"
    step: int
    """The step, counted like `StepDone.step`. For a sum it is the last one."""
    seconds: float
    """The wall time at the coordinator."""
    aborted: bool
    stages: tuple[StageCost, ...]
    links: tuple[LinkFigures, ...]
    steps: int = 1
    """The number of steps that were summed."""


@dataclass(frozen=True, kw_only=True)
class WindowsPlanned(Event):
    """The windows of a row's links change, with the next step at the earliest. The other fields are the
    measures from which they were planned (`node.tuning.window_plan`)."""

    event: ClassVar[str] = "windows-planned"
    epoch: int
    step: int
    """The step that was measured, counted like `StepDone.step`."""
    windows: tuple[int, ...]
    """The window of each link, first link first."""
    forward: tuple[float, ...]
    """The seconds of a microbatch on each stage."""
    backward: tuple[float, ...]
    activation_bytes: float
    gradient_bytes: float
    round_trips: tuple[float, ...]
    """The round trip of each link in seconds; 0 while unknown."""
    rates_up: tuple[float, ...]
    """Bytes per second from a link's lower stage; 0 while unknown, as in the next three fields."""
    rates_down: tuple[float, ...]
    lines_up: tuple[float, ...]
    """The most bytes per second that each stage's machine sends."""
    lines_down: tuple[float, ...]
    replica: int = 0
    """The row of the grid."""


@dataclass(frozen=True, kw_only=True)
class StepAborted(Event):
    """The step was discarded and runs again."""

    event: ClassVar[str] = "step-aborted"
    epoch: int
    step: int
    """The step, counted like `StepDone.step`."""
    reason: str
    kind: str = ""
    """`lost` (node), `failed` (stage), `not-finite` (value), `differs` (rows) or `placement` (changed)."""

    @property
    def is_planned(self) -> bool:
        """Whether the placement changes on purpose: a row enters, groups move, or a node leaves in order."""
        return self.kind == "placement"


WAITS = -1
"""Stands for a row if no row has the group yet."""


@dataclass(frozen=True, kw_only=True)
class SeatLost(Event):
    """A node that hosted a stage is gone, and the steps continue: complete rows do the work of its row."""

    event: ClassVar[str] = "seat-lost"
    epoch: int
    step: int
    """The step, counted like `StepDone.step`."""
    node_id: str
    row: int
    stage: int
    reason: str
    groups: tuple[int, ...] = ()
    """The groups of the running step that are lost: of its row, and what other rows had handed over to it;
    empty between two steps, or if all of them were done."""
    takers: tuple[int, ...] = ()
    """For each of these groups, the row that computes it now; `WAITS` for a group that first needs more
    work."""
    lost_seconds: float = 0.0
    """What the nodes of rows had spent on them, in seconds times nodes."""
    kept: tuple[int, ...] = ()
    """The groups that its row had handed over: nobody computes them again."""

    @property
    def text(self) -> str:
        """The event in one line, for display."""
        whose = f"stage {self.stage} of row {self.row} is empty: {self.reason}"
        if self.kept:
            whose += f"; of its groups, {', '.join(map(str, self.kept))} are kept"
        if not self.groups:
            return f"{whose}; training continues"
        takers = dict(zip(self.groups, self.takers, strict=True))
        each = [f"group {group} by row {row}" for group, row in takers.items() if row != WAITS]
        if waiting := [str(group) for group, row in takers.items() if row == WAITS]:
            each.append(f"group{'s' if len(waiting) > 1 else ''} {', '.join(waiting)} by the first free row")
        return f"{whose}; step {self.step} continues, {', '.join(each)}"


@dataclass(frozen=True, kw_only=True)
class SeatFilled(Event):
    """A node that followed the run takes an empty seat. Its row works again once it is complete."""

    event: ClassVar[str] = "seat-filled"
    epoch: int
    step: int
    """The first step with it, counted like `StepDone.step`."""
    node_id: str
    row: int
    stage: int

    @property
    def text(self) -> str:
        """The event in one line, for display."""
        return f"{self.node_id} has stage {self.stage} of row {self.row} from step {self.step} on"


@dataclass(frozen=True, kw_only=True)
class SnapshotStored(Event):
    """A complete snapshot is on the coordinator's disk."""

    event: ClassVar[str] = "snapshot"
    step: int
    bytes: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """Anything else that is worth a line."""

    event: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True, kw_only=True)
class NodeReplaced(Notice):
    """A node has lost its stage, is shut out, or stays only because no other can take its stage."""

    event: ClassVar[str] = "replaced"
    node_id: str


@dataclass(frozen=True, kw_only=True)
class Recovered(Notice):
    """The run recovered from an interruption: every stage holds the state of `step` again."""

    event: ClassVar[str] = "recovered"
    step: int
    """The number of steps done."""
    seconds: float
    """The seconds since the interruption."""


@dataclass(frozen=True, kw_only=True)
class CodecsPlanned(Notice):
    """From the next step on, links use these codecs."""

    event: ClassVar[str] = "codecs-planned"
    step: int
    """The number of steps done."""
    activations: tuple[str, ...]
    """The codec of each boundary, first boundary first."""
    gradients: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StoragesPlanned(Notice):
    """From the next step on, stages store their activations in these forms."""

    event: ClassVar[str] = "storages-planned"
    step: int
    """The number of steps done."""
    storages: tuple[str, ...]
    """The storage of each stage, first stage first, as named by `node.tuning.storage_choice.name_of`."""


@dataclass(frozen=True, kw_only=True)
class DiskRoom(Notice):
    """The coordinator's disk is full and the run pauses, or the disk has space again."""

    event: ClassVar[str] = "disk-room"
    full: bool


@dataclass(frozen=True, kw_only=True)
class DataDropped(Notice):
    """Documents were left out of the training data. The line says why."""

    event: ClassVar[str] = "data-dropped"
    reasons: Mapping[str, int]
    """The number of documents by reason, in what has been read so far."""

    @classmethod
    def of(cls, reasons: Mapping[str, int]) -> "DataDropped":
        return cls(text=f"left out of the training data so far: {dropped_text(reasons)}", reasons=reasons)


@dataclass(frozen=True, kw_only=True)
class SnapshotSetAside(Notice):
    """A stored snapshot was found to be damaged during the run and is no longer used."""

    event: ClassVar[str] = "snapshot-set-aside"
    step: int
    whole: int
    """The step of the newest undamaged snapshot. All later ones are set aside too."""


@dataclass(frozen=True, kw_only=True)
class ModelStored(Notice):
    """The last step's weights are on the coordinator's disk. The rest of its snapshot follows."""

    event: ClassVar[str] = "model"
    step: int

    @classmethod
    def of(cls, step: int, directory: Path) -> "ModelStored":
        export = f"thinwire export {shlex.quote(str(directory))} FOLDER"
        return cls(
            text=f"the model of step {step} is here: {export}; the optimizer's state follows", step=step
        )


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Totals since this coordinator continued the run. Bytes are those of steps on all links in both
    directions, including aborted and repeated steps, but not held-out samples."""

    steps: int
    """The number of different steps: a step that ran again counts once."""
    first_loss: float
    """The loss of the first step with labels, and `last_loss` that of the last one; NaN if no step had
    labels."""
    last_loss: float
    tokens: int
    seconds: float
    tokens_per_second: float
    link_bytes: int
    link_bytes_fp32: int
    """The bytes of the same elements at 4 bytes each."""
    link_bytes_bf16: int
    """The bytes of the same elements at 2 bytes each."""
    bits_forward: float
    bits_backward: float
    stages: tuple[StageCost, ...]
    snapshot_path: str
    weights_sha256: str
    machines: tuple[str, ...] = ()
    """Each machine's name, and the number of steps in which it took part."""
    since: int = 0
    """The number of steps that were done before."""
    again: int = 0
    """The number of steps that ran again after a rollback. Their time and bytes count."""
    held_out_bytes: int = 0
    """The bytes of held-out samples, with the run's codecs and without."""


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The last event of a run."""

    event: ClassVar[str] = "run-finished"
    reason: str
    failed: bool
    summary: RunSummary | None = None
    resume: str = ""
    """The command that continues the run; empty once all steps are done."""


def text_of(event: Event, shown: Callable[[str], str]) -> str | None:
    """An event in one line, for display; None for kinds that are shown in other ways. It may quote nodes, so
    escape it.

    Args:
        shown: how to show a node, by its id.
    """
    match event:
        case NodeJoined():
            return f"joined: {shown(event.node_id)} ({event.device})"
        case NodeLeft():
            return f"left: {shown(event.node_id)}: {event.reason}"
        case PlacementMade():
            seats = replace(event, nodes=tuple(map(shown, event.nodes))).placed
            return f"placed (epoch {event.epoch}): {seats}; from step {event.resume_step}"
        case StepAborted():
            if event.is_planned:
                return f"planned change of placement before step {event.step}"
            return f"step {event.step} aborted and runs again: {event.reason}"
        case SnapshotStored():
            return f"snapshot of step {event.step}: {bytes_text(event.bytes)}"
        case HeldOutLoss() | SampleMade() | TaskScores():
            return event.line
        case SeatLost() | SeatFilled() | Notice():
            return event.text
        case RunFinished():
            word = "failed" if event.failed else "stopped" if event.resume else "finished"
            return f"{word}: {event.reason}"
        case _:
            return None


def from_json(line: str) -> Event:
    """Read one line that `Event.to_json` wrote.

    A missing field gets its default (older writers), and unknown fields are ignored (newer writers).

    Raises:
        ProtocolViolationError: the line is no JSON, or has an unknown kind, a missing field without default,
            or a wrong type.
    """
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolViolationError(f"an event line is not JSON ({error}): {line[:80]!r}") from error
    return from_fields(raw)


def from_fields(raw: Any) -> Event:
    """`from_json` for a parsed line."""
    name = str(raw.get("event")) if isinstance(raw, dict) else ""
    if name not in _KINDS:
        raise ProtocolViolationError(f"an event line has no known kind: {str(raw)[:80]!r}")
    return cast(Event, read_value({key: raw[key] for key in raw if key != "event"}, _KINDS[name], name))


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


@cache
def _required(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind) if not _optional(field))


def read_value(value: Any, hint: Any, name: str) -> Any:
    """Convert `value`, parsed from JSON, to the type `hint` of the field `name`. Objects are read as in
    `from_json`.

    Raises:
        ProtocolViolationError: the value does not have this type.
    """
    # There are shortcuts for plain types, here and below, because histories are long.
    if type(value) is hint:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):  # only `X | None` occurs
        return None if value is None else read_value(value, get_args(hint)[0], name)
    if origin is tuple and isinstance(value, list):
        kind = get_args(hint)[0]
        return tuple([item if type(item) is kind else read_value(item, kind, name) for item in value])
    if origin is Mapping and isinstance(value, dict):
        kind = get_args(hint)[1]
        return {
            key: item if type(item) is kind else read_value(item, kind, name) for key, item in value.items()
        }
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        if missing := sorted(_required(hint) - value.keys()):
            raise ProtocolViolationError(f"{name} has no {', '.join(missing)}")
        return hint(
            **{
                key: item if type(item) is kind else read_value(item, kind, f"{name}.{key}")
                for key, kind in _hints(hint).items()
                if (item := value.get(key, MISSING)) is not MISSING
            }
        )
    if isinstance(hint, EnumType) and isinstance(value, str) and value.upper() in hint.__members__:
        return hint[value.upper()]
    if hint is float:
        if value is None:
            return float("nan")
        if type(value) is int:
            return float(value)
    raise ProtocolViolationError(f"{name} has the wrong type: {str(value)[:80]!r}")


def _optional(dataclass_field: "Field[Any]") -> bool:
    return dataclass_field.default is not MISSING or dataclass_field.default_factory is not MISSING


def _dumps(fields: dict[str, Any], separators: tuple[str, str] | None = None) -> str:
    try:
        return json.dumps(fields, allow_nan=False, separators=separators, default=plain_fields)
    except ValueError:  # there are NaN or infinities, which JSON does not have
        return json.dumps(finite(fields), separators=separators)


def plain_fields(value: Any) -> dict[str, Any]:
    """The fields of a value that JSON's encoder does not know: a dataclass, or a mapping that is no dict."""
    if isinstance(value, Figures):
        return value.json_fields()
    return vars(value) if is_dataclass(value) else dict(value)


def finite(value: Any) -> Any:
    """`value` as JSON can hold it: dataclasses as dictionaries, tuples as lists, NaN and infinities as
    None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, Mapping) or is_dataclass(value):
        return {key: finite(item) for key, item in plain_fields(value).items()}
    return value
