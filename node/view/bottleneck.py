"""Names what limits a run's speed, in sentences. All functions are pure; their input is a `RunView`.

The sentences say what was measured (shares of time, use of links) and what a change would gain. Gains follow
from the lower bound on step time (`node/schedule/floor.py`), with measured times and changed bytes or blocks.
Time beyond the bound is assumed to stay. Advice is based on more steps than the displayed figures, and must
hold in each half of them, so that noise neither causes nor changes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.schedule.floor import Floor, ResourceKind
from node.telemetry.format import counted, duration_text, mbit_text
from node.view.remedies import Remedy, better_codec, better_split, same_bytes_less_loss
from node.view.run_view import LinkView, RunView, StageView
from node.view.step_model import BY_PROGRAM, FULL, LITTLE, SharedUpload, StepModel, shared_uploads

PACE = 0.7
"""From this efficiency on, the resource that sets the lower bound is said to set the pace."""
WAITING = 0.15
"""The least share of waiting time that is worth a sentence."""
PACKING = 0.25
"""Encoding and decoding are mentioned from this share of a stage's time on."""
MOST_SENTENCES = 3


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The steps on which advice is based."""

    whole: RunView
    parts: tuple[RunView, ...]
    """The view measured over each half of them."""

    def row(self, replica: int) -> "Evidence":
        return Evidence(whole=self.whole.row(replica), parts=tuple(part.row(replica) for part in self.parts))


def bottleneck(
    view: RunView,
    codec_bits: Mapping[str, float],
    ends_in_blocks: Sequence[float] = (),
    evidence: Evidence | None = None,
    *,
    advises: bool = True,
) -> tuple[str, ...]:
    """Sentences about what limits the run, most important first; empty before there are measurements.

    Args:
        codec_bits: bits per element on this run's links, by codec.
        ends_in_blocks: compute cost of the embedding and the head, in blocks. Without it no split is
            proposed.
        evidence: the steps on which advice is based, if not those of `view`.
        advises: whether these are enough steps for advice.
    """
    if view.state == "waiting for nodes":
        members, wanted = len(view.members), view.stages_wanted
        if members >= wanted:
            present = f"{counted(members, 'node')} {'is' if members == 1 else 'are'} here"
            return (f"waiting for a stage's node: {present}, but none fits and none is back yet",)
        return (f"waiting for nodes: {members} of {wanted} are here; {_how_to_join(view.token_uses)}",)
    if view.rows > 1:
        return _rows(view, codec_bits, ends_in_blocks, evidence, advises=advises)
    model = StepModel.of(view)
    if model is None:
        return ()
    floor = model.floor()
    advice = _Advice.of(view, model, evidence, advises=advises)
    sentences = [
        *_links(view, model, floor, codec_bits, advice),
        *_stages(view, model, floor, ends_in_blocks, advice),
        *_packing(view, advice),
        *_coordinator(view),
    ]
    if not sentences:
        sentences = [*_latency(view, model, floor), *_bubble(view, floor)]
    sentences = sentences or [_nothing(view)]
    models = (advice.model, *advice.parts)
    exchange = same_bytes_less_loss(view.links, models, codec_bits) if advice.enough else None
    return tuple([*sentences, *([exchange] if exchange else [])][:MOST_SENTENCES])


@dataclass(frozen=True, kw_only=True)
class _Advice:
    model: StepModel
    view: RunView
    parts: tuple[StepModel, ...]
    enough: bool

    @classmethod
    def of(cls, view: RunView, model: StepModel, evidence: Evidence | None, *, advises: bool) -> "_Advice":
        whole = evidence.whole if evidence else view
        parts = [StepModel.of(part) for part in (evidence.parts if evidence else ())]
        return cls(
            model=StepModel.of(whole) or model,
            view=whole,
            parts=tuple(part for part in parts if part is not None),
            enough=advises,
        )

    def words(self, remedy: Remedy | None) -> list[str]:
        """The remedy's text, if there are enough steps for it and all parts of them agree; else empty."""
        confirmed = remedy.confirmed(self.parts) if remedy is not None and self.enough else None
        return [confirmed.text] if confirmed is not None else []


# ---- the cases


def _rows(
    view: RunView,
    codec_bits: Mapping[str, float],
    ends_in_blocks: Sequence[float],
    evidence: Evidence | None,
    *,
    advises: bool,
) -> tuple[str, ...]:
    """Which row the others wait for, what limits that row, and what share of the step sums the gradients."""
    sync = [_sync_share(view.row(replica)) for replica in range(view.rows)]
    if not all(stage.shares for stage in view.stages):
        return ()
    slowest = min(range(view.rows), key=lambda replica: (sync[replica], replica))
    of_row = evidence.row(slowest) if evidence else None
    sentences = list(bottleneck(view.row(slowest), codec_bits, ends_in_blocks, of_row, advises=advises))
    if max(sync) - sync[slowest] >= WAITING:
        others = [replica for replica in range(view.rows) if sync[replica] - sync[slowest] >= WAITING]
        share = sum(sync[replica] for replica in others) / len(others)
        count = len(view.groups[slowest])
        head = (
            f"row {slowest} ends its {count} group{'s' if count > 1 else ''} last: "
            f"{_rows_text(others)} {_percent(share)} of the time for its gradients"
        )
        return tuple([f"{head}; {sentences[0]}" if sentences else head, *sentences[1:]][:MOST_SENTENCES])
    if sync[slowest] >= WAITING:
        full = [link for link in view.links if link.source_replica != link.target_replica and link.full]
        why = f"; {_sync_link(full[0])}" if full else ""
        sentences.insert(
            0,
            f"all rows sum their gradients {_percent(sync[slowest])} of the time after their last "
            f"microbatch{why}; fewer bits in `pipeline.sync_codec` (in rounds `sync.codec`) or a larger "
            "`training.global_batch` would help",
        )
    elif sentences:
        sentences[0] = f"row {slowest}: {sentences[0]}"
    return tuple(sentences[:MOST_SENTENCES])


def _sync_share(row: RunView) -> float:
    """The least share of time that a stage of a row waits for other rows. This stage finishes last in the
    row."""
    return min((stage.shares.get("sync", 0.0) for stage in row.stages), default=0.0)


def _rows_text(rows: Sequence[int]) -> str:
    return f"row {rows[0]} waits" if len(rows) == 1 else f"rows {', '.join(map(str, rows))} wait"


def _sync_link(link: LinkView) -> str:
    return (
        f"the link of stage {link.source} from row {link.source_replica} to {link.target_replica} is full "
        f"({_percent(link.use or 0.0)} of {_rate(link)})"
    )


def _links(
    view: RunView, model: StepModel, floor: Floor, codec_bits: Mapping[str, float], advice: _Advice
) -> list[str]:
    """Full links, fullest first. Without any, the link that sets the lower bound, if the step is near the
    bound."""
    uploads = shared_uploads(view)
    shared = [link for upload in uploads for link in upload.links]
    full = [link for link in view.links if (link.use or 0.0) >= FULL and link not in shared]
    full.sort(key=lambda link: -(link.use or 0.0))
    what = "is full"
    if (
        not full
        and not uploads
        and floor.binds.kind is ResourceKind.LINK
        and floor.seconds >= PACE * model.seconds
    ):
        pair = floor.binds.stage, floor.binds.peer_stage
        known = [link for link in view.links if link.use is not None and link.use >= LITTLE]
        full = [link for link in known if (link.source, link.target) == pair]
        what = "sets the pace"
    sentences = [_upload(upload) for upload in uploads]
    for link in full:
        if link.processor >= BY_PROGRAM:
            sentences.append(
                f"the program limits link {link.source} to {link.target}, not the line: at {_rate(link)} the "
                f"thread of stage {link.source} that sends computes {_percent(link.processor)} of the time"
            )
            continue
        sentences.append(
            f"link {link.source} to {link.target} {what}: {_percent(link.use or 0.0)} of {_rate(link)}"
        )
    if not sentences:
        return []
    # Who waits and what would help is the same for all links, so it is said once.
    parts = [sentences[0]]
    if waiting := _who_waits(view.stages):
        parts.append(waiting)
    # Once this direction is relieved, the other one may limit. So all links are passed, these first.
    others = [link for link in view.links if link not in shared and link not in full]
    parts += advice.words(better_codec([*shared, *full, *others], advice.model, codec_bits))
    return ["; ".join(parts), *sentences[1:]]


def _upload(upload: SharedUpload) -> str:
    targets = _stages_text([link.target for link in upload.links])
    return (
        f"stage {upload.stage} sends {mbit_text(upload.mbit)} of about {mbit_text(upload.capacity_mbit)} to "
        f"{targets} together: its links to them are full and seem to share its upload"
    )


def _stages(
    view: RunView, model: StepModel, floor: Floor, ends_in_blocks: Sequence[float], advice: _Advice
) -> list[str]:
    """The busiest stage, if it has no time left, or if it sets a lower bound that the step is near."""
    busiest = max(view.stages, key=lambda stage: stage.busy)
    near = floor.binds.kind is ResourceKind.COMPUTE and floor.seconds >= PACE * model.seconds
    if busiest.busy < FULL and not (near and floor.binds.stage == busiest.stage):
        return []
    others = [stage for stage in view.stages if stage is not busiest]
    parts = [f"stage {busiest.stage} is the slowest: it computes {_percent(busiest.busy)} of the time"]
    if waiting := _who_waits(others):
        parts.append(waiting)
    parts += advice.words(better_split(advice.view, advice.model, ends_in_blocks))
    return ["; ".join(parts)]


def _packing(view: RunView, advice: _Advice) -> list[str]:
    """The stage that spends most on packing, if that is much of its time and it is the busiest."""
    stage = max(view.stages, key=_packing_share)
    share = _packing_share(stage)
    if share < PACKING or stage.busy < max(other.busy for other in view.stages):
        return []
    codecs = " and ".join(f"`{name}`" for name in dict.fromkeys((view.forward_codec, view.backward_codec)))
    text = f"stage {stage.stage} packs and unpacks tensors {_percent(share)} of the time ({codecs})"
    remedy = Remedy.of("codecs that cost no time", advice.model, StepModel.without_packing)
    return ["; ".join([text, *advice.words(remedy)])]


def _coordinator(view: RunView) -> list[str]:
    """Waiting for the coordinator, by every stage or by stage 0."""
    shares = [stage.shares.get("wait-coordinator", 0.0) for stage in view.stages]
    if min(shares) >= WAITING:
        return [
            f"every stage waits for the coordinator at least {_percent(min(shares))} of the time: look at "
            "its disk, its processor and the round trip to it"
        ]
    # If only stage 0 waits long for the coordinator, the others wait for stage 0, which ends a step last.
    if shares[0] < WAITING:
        return []
    return [
        f"stage 0 waits for the coordinator {_percent(shares[0])} of the time, and the others for stage 0: "
        "look at the path of each step's tokens: the coordinator's disk, the network, that node"
    ]


def _latency(view: RunView, model: StepModel, floor: Floor) -> list[str]:
    """Nothing is full, but stages wait for each other longer than the lower bound explains."""
    waits = [
        stage.shares.get("wait-upstream", 0.0) + stage.shares.get("wait-downstream", 0.0)
        for stage in view.stages
    ]
    slowest = max(view.links, key=lambda link: link.round_trip_seconds, default=None)
    if slowest is None or max(waits) < WAITING or floor.seconds >= PACE * model.seconds:
        return []
    if slowest.round_trip_seconds < model.microbatch_seconds / 2:
        return []
    return [
        f"tensors are on their way: no link is full, and a round trip from stage {slowest.source} to "
        f"{slowest.target} takes {duration_text(slowest.round_trip_seconds)}; a wider `pipeline.window` "
        f"would give at most {math.ceil(10 * model.seconds / floor.seconds) / 10:.1f} x"
    ]


def _bubble(view: RunView, floor: Floor) -> list[str]:
    """Filling and draining the pipeline takes a large part of the step."""
    edges = floor.seconds - view.microbatches * floor.microbatch_seconds
    if len(view.stages) < 2 or edges < 0.3 * floor.seconds:
        return []
    return [
        f"the pipeline fills and drains for {_percent(edges / floor.seconds)} of the shortest step that can "
        f"be: `pipeline.sequence_chunks` above {view.slices} would help, or more than {view.microbatches} "
        "microbatches per step and row (a larger `training.global_batch`, or a smaller `training.microbatch`)"
    ]


def _nothing(view: RunView) -> str:
    busiest = max(view.stages, key=lambda stage: stage.busy)
    return (
        f"nothing stands out: the busiest stage, {busiest.stage}, works {_percent(busiest.busy)} of the time "
        "and no link is full"
    )


# ---- words


def _how_to_join(token_uses: int | None) -> str:
    """The join line contains a secret: say where it is, not what it is."""
    if token_uses is None:
        return "paste the join line on another machine; `thinwire token create RUN_DIR` makes a new one"
    if token_uses == 0:
        return "no join token is left: `thinwire token create RUN_DIR` makes a join line for one more"
    nodes = "one more node" if token_uses == 1 else f"{token_uses} more nodes"
    return (
        f"paste the join line that the coordinator printed on another machine (tokens are left for {nodes}; "
        "`thinwire token create RUN_DIR` makes a new line)"
    )


def _who_waits(stages: Sequence[StageView]) -> str:
    """Stages that wait much, with their mean: `stages 3 and 4 wait 61 % of the time`."""
    waiting = [stage for stage in stages if stage.waiting >= WAITING]
    if not waiting:
        return ""
    mean = sum(stage.waiting for stage in waiting) / len(waiting)
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{_stages_text([stage.stage for stage in waiting])} {verb} {_percent(mean)} of the time"


def _stages_text(numbers: Sequence[int]) -> str:
    """`stage 3`, `stages 0 and 2`, `stages 0, 2 and 3`; more than three consecutive ones as `stages 0 to
    7`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"stage {first}"
    if len(numbers) > 3 and list(numbers) == list(range(first, last + 1)):
        return f"stages {first} to {last}"
    return f"stages {', '.join(map(str, numbers[:-1]))} and {last}"


def _packing_share(stage: StageView) -> float:
    return stage.shares.get("encode", 0.0) + stage.shares.get("decode", 0.0)


def _rate(link: LinkView) -> str:
    return mbit_text(link.capacity_mbit)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
