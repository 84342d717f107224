"""The bottleneck in words: each case, and that no sentence ever says what its inputs do not."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.cli.main import build_parser
from node.config.schema import ModelSection
from node.model.units import ends_in_blocks
from node.schedule.floor import LinkRate, Network
from node.schedule.schedule import Kind, schedule
from node.schedule.simulation import Timeline, simulate
from node.telemetry import events
from node.telemetry.clock import TimeKind
from node.view.bottleneck import WAITING, bottleneck
from node.view.remedies import Remedy
from node.view.run_view import FlowView, LinkView, RunView, StageView
from node.view.step_model import EACH_TOGETHER, FULL, StepModel, full_links, packing_seconds, shared_uploads
from node.view.view_builder import LEAST_ADVICE_STEPS, view
from tests.support.paths import ROOT
from tests.support.run_events import (
    NODES,
    costs,
    done,
    history,
    joined,
    opening,
    placed,
    stage_cost,
    started,
    step,
)
from wire.codecs.formats import codec_format, proposed_names
from wire.spec import Direction

BITS = {"fp32": 32.03, "fixed-8": 8.26, "fixed-6": 6.26, "fixed-4": 4.26, "tah": 4.42} | {
    "trellis-4": 4.0,
    "trellis-4.41": 4.41,
}
GPU = "NVIDIA H200"
MICROBATCHES = 8


def stage(number: int, blocks: int = 4, **shares: float) -> StageView:
    """Shares by kind, with underscores; what is left of 1 is `wait-downstream`."""
    kinds = {kind.value: shares.get(kind.value.replace("-", "_"), 0.0) for kind in TimeKind}
    kinds["wait-downstream"] += 1.0 - sum(kinds.values())
    waiting = sum(share for kind, share in kinds.items() if kind.startswith("wait"))
    return StageView(
        stage=number,
        node_id=f"node-{number}",
        device="cpu",
        blocks=blocks,
        present=True,
        shares=kinds,
        busy=max(0.0, 1.0 - waiting),
        waiting=waiting,
        memory_bytes=0,
        peak_memory_bytes=0,
        gpu_memory_bytes=0,
        gpu_peak_memory_bytes=0,
    )


def link(
    source: int, target: int, mbit: float, capacity: float, round_trip: float = 0.001, codec: str = "fixed-6"
) -> LinkView:
    direction = Direction.ACTIVATION if source < target else Direction.GRADIENT
    return LinkView(
        source=source,
        target=target,
        bytes=10**9,
        mbit=mbit,
        capacity_mbit=capacity,
        use=min(1.0, mbit / capacity) if capacity else None,
        busy=0.5,
        flows=(
            FlowView(
                direction=direction,
                codec=codec,
                bits_per_element=BITS[codec],
                mbit=mbit,
                bytes=10**9,
                elements=10**9,
            ),
        ),
        round_trip_seconds=round_trip,
        retransmits=0,
        rejects=0,
        queued_bytes=0,
    )


def seen(stages: Sequence[StageView], links: Sequence[LinkView] = (), seconds: float = 1.0) -> RunView:
    base = view(history(opening(), step(1)))
    return replace(
        base,
        stages=tuple(stages),
        links=tuple(links),
        step_seconds=seconds,
        microbatches=MICROBATCHES,
        stages_wanted=len(stages),
    )


MODEL = StepModel(
    seconds=1.0,
    microbatches=MICROBATCHES,
    chunks=1,
    slices=1,
    forward=(0.04, 0.01),
    backward=(0.07, 0.02),
    packing=(0.0, 0.0),
    activation_bytes=0.0,
    gradient_bytes=0.0,
    links=(LinkRate(),),
    interfaces=(LinkRate(), LinkRate()),
    after_seconds=0.0,
)


def says(run: RunView, bits: Mapping[str, float] = BITS, ends: Sequence[float] = (0.0, 0.0)) -> str:
    return " | ".join(bottleneck(run, bits, ends))


def on(device: str, run: RunView) -> RunView:
    return replace(run, stages=tuple(replace(stage, device=device) for stage in run.stages))


def uneven(number: int, share: float) -> list[events.Event]:
    """A step in which stage 0 computes `share` of the time and stage 1 less."""
    one = costs(number)
    stages = (
        stage_cost(0, NODES[0], 1.0, backward=share * 2 / 3, wait_downstream=1 - share),
        stage_cost(1, NODES[1], 1.0, backward=0.3, wait_upstream=0.55),
    )
    return [replace(one, stages=stages), done(number)]


def after(shares: Sequence[float]) -> str:
    steps = (uneven(number, share) for number, share in enumerate(shares, 1))
    ends = replace(started(), ends_in_blocks=(0.0, 0.0))
    opened = [ends, *(joined(node) for node in NODES), placed()]
    return " | ".join(view(history(opened, *steps)).bottleneck)


def test_advice_waits_for_enough_steps_and_tells_its_range() -> None:
    early = after([0.9] * (LEAST_ADVICE_STEPS - 1))
    assert "stage 0 is the slowest: it computes 90 %" in early and "pipeline.split" not in early
    even = after([0.9] * LEAST_ADVICE_STEPS)
    assert re.search(r"`pipeline.split = \[\d, \d\]` would give about [\d.]+ x: `thinwire set", even)
    uneven_steps = after([0.99] * 20 + [0.86] * 20)
    found = re.search(r"`pipeline.split = \[\d, \d\]` would give ([\d.]+) to ([\d.]+) x", uneven_steps)
    assert found and 1.05 <= float(found[1]) < float(found[2])


def test_what_only_half_of_the_steps_show_is_no_advice() -> None:
    remedy = Remedy.of("x", MODEL, lambda model: model.with_blocks([4, 4], [3, 5]))
    assert remedy is not None and remedy.confirmed([MODEL, MODEL]) is not None
    other_way = replace(MODEL, forward=MODEL.forward[::-1], backward=MODEL.backward[::-1])
    assert remedy.confirmed([MODEL, other_way]) is None


def test_advice_stays_the_same_while_steps_are_noisy() -> None:
    said = set()
    noise = [0.86 + 0.03 * ((7 * number) % 5) for number in range(60)]
    for count in range(40, 60):
        said |= set(re.findall(r"pipeline.split = \[[\d, ]+\]", after(noise[:count])))
    assert len(said) == 1


def test_a_line_that_one_of_its_links_leaves_more_often_is_shared_all_the_same() -> None:
    """As measured on a line of 5 Mbit/s: one of its links alone looked like 72 % of 2.14."""
    links = [link(1, 0, 1.54, 2.14), link(1, 2, 2.86, 3.3), link(0, 1, 2.0, 20), link(2, 1, 2.0, 20)]
    run = seen([stage(n, forward=0.05, backward=0.1) for n in range(3)], links)
    assert says(run).startswith("stage 1 sends 4.4 Mbit/s of about 5.08 Mbit/s to stages 0 and 2 together")
    (upload,) = shared_uploads(run)
    assert upload.capacity_mbit == pytest.approx(5, rel=0.03)
    idle = [link(1, 0, 0.9, 2.14), link(1, 2, 2.86, 3.3)]
    assert shared_uploads(replace(run, links=tuple(idle))) == ()


def test_equal_links_that_are_full_share_nothing() -> None:
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1)]
    run = seen([stage(n, forward=0.05, backward=0.1) for n in range(3)], [link(*p, 96, 100) for p in pairs])
    assert shared_uploads(run) == ()
    assert says(run).count("is full: 96 % of 100 Mbit/s") == 3  # of four links


def test_no_gain_is_promised_without_a_narrower_codec() -> None:
    stages = [stage(0, forward=0.1, backward=0.1), stage(1, forward=0.1, backward=0.1)]
    run = seen(stages, [link(0, 1, 95, 100), link(1, 0, 20, 100)])
    assert says(run, {}) == "link 0 to 1 is full: 95 % of 100 Mbit/s; stages 0 and 1 wait 80 % of the time"


def test_a_head_stays_where_it_is() -> None:
    """Two blocks and a head that costs as much as six: blocks can go elsewhere, the head cannot."""
    stages = [
        stage(0, blocks=4, forward=0.15, backward=0.3),
        stage(1, blocks=2, forward=0.3, backward=0.6),
    ]
    text = says(seen(stages), ends=(0.0, 6.0))
    found = re.search(r"`pipeline.split = \[5, 1\]` would give about ([\d.]+) x", text)
    # One of its eight parts goes: 8 / 7, less what the pipeline takes to fill and to drain.
    assert found and 1.08 < float(found[1]) <= 1.15
    assert "pipeline.split" not in says(seen(stages), ends=()), "what the head costs is not known"


def test_the_ends_of_a_model_in_blocks() -> None:
    model = ModelSection(hidden=64, heads=4, kv_heads=4, ffn=128, vocab=1000, sequence=32)
    # A block: 4 h h and 3 h f weights, attention over half of the sequence; the head: h v weights.
    block = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 2 * 64 * 32
    assert ends_in_blocks(model) == (0.0, pytest.approx(2 * 64 * 1000 / block))


def test_an_even_split_is_kept() -> None:
    stages = [stage(n, forward=0.3, backward=0.62) for n in range(2)]
    assert "pipeline.split" not in says(seen(stages))


def test_packing_that_takes_long() -> None:
    stages = [stage(n, forward=0.2, backward=0.3, encode=0.25, decode=0.1) for n in range(2)]
    text = says(seen(stages, [link(0, 1, 5, 1000)]))
    assert "packs and unpacks tensors 35 % of the time (`fixed-6` and `fixed-8`)" in text
    assert "codecs that cost no time would give about" in text


def test_a_coordinator_that_is_slow() -> None:
    stages = [stage(n, forward=0.2, backward=0.3, wait_coordinator=0.3 + n / 10) for n in range(2)]
    assert "every stage waits for the coordinator at least 30 % of the time" in says(seen(stages))


def test_a_first_stage_that_waits_for_its_tokens() -> None:
    stages = [
        stage(0, forward=0.1, backward=0.2, wait_coordinator=0.65),
        stage(1, forward=0.1, backward=0.2, wait_upstream=0.6, wait_coordinator=0.1),
    ]
    text = says(seen(stages))
    assert text.startswith("stage 0 waits for the coordinator 65 % of the time, and the others for stage 0")
    assert "nothing stands out" not in text


def test_waiting_for_other_stages_is_not_called_a_slow_coordinator() -> None:
    stages = [stage(0, forward=0.3, backward=0.4), stage(1, forward=0.2, backward=0.2, wait_coordinator=0.4)]
    assert "waits for the coordinator" not in says(seen(stages))


def test_too_few_microbatches() -> None:
    stages = [stage(n, forward=0.2, backward=0.4) for n in range(4)]
    run = replace(seen(stages), microbatches=4)
    assert "fills and drains for" in says(run) and "more than 4 microbatches" in says(run)


def test_no_stage_or_link_limits() -> None:
    stages = [stage(n, forward=0.2, backward=0.3) for n in range(2)]
    assert says(seen(stages)).startswith("nothing stands out: the busiest stage, 0, works 50 % of the time")


def test_a_link_that_is_little_used_sets_no_pace() -> None:
    """Eight stages and two microbatches: most of a step is filling and draining, and a link that serves each
    microbatch a little longer than a stage does makes the floor, at a fifth of its capacity."""
    stages = [stage(n, forward=0.09, backward=0.09) for n in range(8)]
    for mbit, pace in ((19, False), (21, True)):
        links = [link(n, n + 1, mbit, 1000 if n else 100) for n in range(7)]
        run = replace(seen(stages, links), microbatches=2)
        model = StepModel.of(run)
        assert model is not None and str(model.floor().binds) == "link 0 to 1"
        assert (f"link 0 to 1 sets the pace: {mbit} % of 100 Mbit/s" in says(run)) is pace


def test_what_is_full_is_told_once_for_all() -> None:
    """`LinkView.full` is what the page and `top` follow; links that share an upload are full together."""
    for use, full in ((FULL - 0.01, False), (FULL, True)):
        run = seen([stage(0), stage(1)], [link(0, 1, 100 * use, 100), link(1, 0, 10, 100)])
        assert (full_links(run) == {(0, 1)}) is full
        assert ("is full" in says(run)) is full
    shared = seen(
        [stage(n) for n in range(3)],
        [link(1, 0, 78, 100), link(1, 2, 39, 50)],
    )
    assert full_links(shared) == {(1, 0), (1, 2)}


def test_nothing_is_said_before_the_first_step() -> None:
    assert view(history(opening())).bottleneck == ()


@st.composite
def runs(draw: st.DrawFn) -> RunView:
    count = draw(st.integers(1, 5))
    stages = []
    for number in range(count):
        weights = [draw(st.floats(0, 1)) + 1e-6 for _ in TimeKind]
        shares = dict(zip(TimeKind, (w / sum(weights) for w in weights), strict=True))
        waiting = sum(shares[kind] for kind in TimeKind if kind.value.startswith("wait"))
        blocks = draw(st.integers(0, 9))
        one = stage(number, blocks)
        values = {kind.value: share for kind, share in shares.items()}
        stages.append(replace(one, shares=values, waiting=waiting, busy=1 - waiting))
    links = []
    for number in range(count - 1):
        for pair in ((number, number + 1), (number + 1, number)):
            capacity = draw(st.sampled_from([0.0, 10.0, 100.0, 1000.0]))
            rate = draw(st.floats(0, 1.2)) * (capacity or 100)
            codec = draw(st.sampled_from(sorted(BITS)))
            links.append(link(*pair, rate, capacity, draw(st.floats(0, 0.5)), codec))
    run = seen(stages, links, seconds=draw(st.floats(0.01, 100)))
    return replace(run, microbatches=draw(st.integers(1, 64)), chunks=draw(st.sampled_from([1, 1, 2])))


@given(runs(), st.dictionaries(st.sampled_from(sorted(BITS)), st.floats(2, 33)))
def test_no_sentence_contradicts_its_inputs(run: RunView, bits: dict[str, float]) -> None:
    sentences = bottleneck(run, bits, (0.1, 2.5))
    assert 1 <= len(sentences) <= 3
    full = {(x.source, x.target) for x in run.links if x.use is not None and x.use >= FULL}
    busiest = max(stage.busy for stage in run.stages)
    model = StepModel.of(run)
    assert model is not None
    for sentence in sentences:
        assert sentence.isprintable() and "nan" not in sentence and "inf " not in sentence
        for number, rate in re.findall(r"stage (\d+) sends ([\d.]+) Mbit/s of about", sentence):
            mine = [x for x in run.links if x.source == int(number)]
            assert len(mine) == 2 and min(x.use or 0.0 for x in mine) >= EACH_TOGETHER
            assert float(rate) == pytest.approx(sum(x.mbit for x in mine), rel=0.006)
        for source, target in re.findall(r"link (\d+) to (\d+) is full", sentence):
            assert (int(source), int(target)) in full
        for share, rate in re.findall(r"link \d+ to \d+ [a-z ]+: (\d+) % of ([\d.]+) Mbit/s", sentence):
            assert any(
                abs(100 * (x.use or 0) - int(share)) <= 0.5
                and abs(x.capacity_mbit - float(rate)) <= 0.005 * x.capacity_mbit
                for x in run.links
            )
        if "no link is full" in sentence:
            assert not full
        for number, share in re.findall(r"stage (\d+) is the slowest: it computes (\d+) %", sentence):
            assert run.stages[int(number)].busy == busiest
            assert abs(100 * busiest - int(share)) <= 0.5
        for who, share in re.findall(r"stages? ([\d, andto]+) waits? (\d+) % of the time", sentence):
            numbers = [int(number) for number in re.findall(r"\d+", who)]
            if " to " in who:
                numbers = list(range(numbers[0], numbers[1] + 1))
            waits = [run.stages[number].waiting for number in numbers]
            assert min(waits) >= WAITING
            assert abs(100 * sum(waits) / len(waits) - int(share)) <= 0.51
        for old, new, way in re.findall(r"`(\S+)` to `(\S+)` (?:forward and )?(forward|backward)", sentence):
            direction = {"forward": "activation", "backward": "gradient"}[way]
            flows = [f for x in run.links for f in x.flows if f.codec == old and f.kind == direction]
            assert new in proposed_names() and any(bits[new] < flow.bits_per_element for flow in flows)
        for split in re.findall(r"pipeline.split = \[([\d, ]+)\]", sentence):
            numbers = [int(number) for number in split.split(",")]
            assert sum(numbers) == sum(stage.blocks for stage in run.stages)
            assert min(numbers) >= 1 and len(numbers) == len(run.stages) and run.chunks == 1
        for gain in re.findall(r"would give (?:about|at most) ([\d.]+) x", sentence):
            assert float(gain) >= 1.0
        for share in re.findall(r"waits for the coordinator at least (\d+) %", sentence):
            least = min(stage.shares["wait-coordinator"] for stage in run.stages)
            assert abs(100 * least - int(share)) <= 0.5


@given(runs())
def test_a_gain_is_never_above_what_the_floor_allows(run: RunView) -> None:
    model = StepModel.of(run)
    assert model is not None
    for direction in ("activation", "gradient"):
        before = 1.0
        for factor in (1.0, 0.7, 0.5, 0.1):
            changed = model.with_codecs(**{direction: factor})
            gain = model.gain(changed)
            assert gain >= before - 1e-9, "fewer bytes are never slower"
            assert gain * changed.floor().seconds <= max(model.seconds, model.floor().seconds) * (1 + 1e-9)
            before = gain


def test_a_codec_in_the_same_bytes_at_no_cost_in_loss_is_named_where_it_packs_beside_the_step() -> None:
    stages = [replace(stage(n, forward=0.2, backward=0.3), device=GPU) for n in range(2)]
    links = [link(0, 1, 5.0, 10.0, codec="tah"), link(1, 0, 5.0, 10.0)]
    text = says(seen(stages, links))
    assert "`trellis-4.41` forward takes the bytes of `tah` (4.41 and 4.42 bits per element)" in text
    assert "`tah` cost 1.4 %: `thinwire set RUN_DIR pipeline.forward_codec=trellis-4.41`" in text
    # Not with another codec, nor where a core packs it too slowly.
    assert "trellis" not in says(seen(stages, [link(0, 1, 5.0, 10.0), links[1]]))
    cores = [replace(one, device="cpu") for one in stages]
    many = tuple(replace(flow, elements=10**9) for flow in links[0].flows)
    assert "trellis" not in says(seen(cores, [replace(links[0], flows=many), links[1]]))
    # Too few steps to advise.
    run = seen(stages, links)
    assert "trellis" not in " ".join(bottleneck(run, BITS, (0.0, 0.0), advises=False))


def test_a_link_whose_sender_computes_all_the_time_is_limited_by_the_program() -> None:
    stages = [stage(0, forward=0.3, backward=0.3), stage(1, forward=0.2, backward=0.2)]
    for processor, words in ((0.93, "the program limits link 0 to 1, not the line"), (0.5, "is full")):
        links = [replace(link(0, 1, 940, 1000), processor=processor), link(1, 0, 100, 1000)]
        assert words in says(seen(stages, links)).partition(" | ")[0]


# ---- the codecs that the bottleneck's advice proposes: order, purpose and wording


def results(file: str, key: str) -> list[dict[str, Any]]:
    """What an experiment measured."""
    found: list[dict[str, Any]] = json.loads((ROOT / "scripts/results" / file).read_text("utf-8"))[key]
    return found


def test_the_commands_that_are_named_exist() -> None:
    """`RUN_DIR` put in, they are what the command line takes."""
    stages = [stage(n, forward=0.1, backward=0.1) for n in range(2)]
    full = seen(stages, [link(0, 1, 96, 100, codec="fp32"), link(1, 0, 95, 100, codec="fp32")])
    waits = view(history(started(), events.TokenUses(left=0))).bottleneck
    named = re.findall(r"`thinwire ([^`]+)`", " ".join((says(full), *waits)))
    assert [one.split()[0] for one in named] == ["set", "token"]
    for one in named:
        build_parser().parse(one.split())


def test_codecs_are_named_in_the_order_of_their_errors() -> None:
    """On tensors between stages; `trellis-4`, which was not measured there, on normal numbers."""
    errors: dict[str, list[float]] = {}
    for one in results("boundary_error.json", "results"):
        errors.setdefault(one["codec"], []).append(one["relative_error"])
    for one in results("rivals.json", "results"):
        if one["package"] == "thinwire":
            errors.setdefault(one["method"], []).append(one["relative_error"])
    for one in results("codec_speed.json", "results"):
        errors.setdefault(one["codec"], [one["relative_error"]])
    means = [sum(errors[name]) / len(errors[name]) for name in proposed_names()]
    assert means == sorted(means), dict(zip(proposed_names(), means, strict=True))


def test_packing_costs_are_the_measured_ones() -> None:
    measured: dict[str, list[tuple[float, float]]] = {}
    for one in results("codec_speed.json", "results"):
        times = (one["encode_cpu_nanoseconds_per_element"], one["decode_cpu_nanoseconds_per_element"])
        measured.setdefault(one["codec"], []).append(times)
    for one in results("rivals.json", "speeds"):
        if one["package"] == "thinwire":
            times = (one["encode_nanoseconds_per_element"], one["decode_nanoseconds_per_element"])
            measured.setdefault(one["method"], []).append(times)
    for name in ("fp32", "bf16", "fp16", "fixed-8", "tah", "trellis-4.41"):
        slowest = [max(column) for column in zip(*measured[name], strict=True)]
        assert codec_format(name).core_nanoseconds == pytest.approx(slowest, rel=0.3), name


def test_trellis_is_not_proposed_where_its_packing_takes_what_it_saves() -> None:
    stages = [stage(0, forward=0.1, backward=0.1), stage(1, forward=0.1, backward=0.1)]
    run = seen(stages, [link(0, 1, 20, 100), link(1, 0, 96, 100)])
    # 1.9 million elements a tensor: 0.17 s of packing for each of 8 microbatches in a second.
    assert "`fixed-6` to `tah` backward would" in says(run)
    assert "`fixed-6` to `trellis-4.41` backward would give about 1." in says(on(GPU, run))
    # On a link so slow that packing is nothing beside it, processors have the time for it.
    slow = seen(stages, [link(0, 1, 0.2, 1), link(1, 0, 0.96, 1)])
    assert "`fixed-6` to `trellis-4.41` backward would give about 1." in says(slow)
    # Unless they report that they are far slower than the core that was measured.
    laden = tuple(
        replace(one, shares={**one.shares, "encode": 0.5, "wait-downstream": one.waiting - 0.5})
        for one in slow.stages
    )
    assert "trellis" not in says(replace(slow, stages=laden))


# ---- a remedy's promised gain against a simulated run with that change


MANY, WINDOW = 32, 8
ELEMENTS = 1_000_000
"""Of a tensor between stages."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A pipeline with known times and rates. Rates in Mbit/s, times in seconds per microbatch."""

    blocks: tuple[int, ...]
    a_block: tuple[float, ...]
    """Of each stage's machine; a backward takes twice as long."""
    up: tuple[float, ...]
    """Of each link from the lower stage to the higher."""
    down: tuple[float, ...]
    uploads: tuple[float, ...] = ()
    """What each stage can send over all its links; empty: no limit."""
    latency: float = 0.0
    forward_codec: str = "tah"
    backward_codec: str = "fixed-8"
    device: str = "cpu"
    """Of all stages; a processor computes nothing while it packs, a GPU packs in no time."""

    @property
    def packing(self) -> tuple[float, ...]:
        """Of each stage, seconds a microbatch."""
        if self.device != "cpu":
            return (0.0,) * len(self.blocks)
        codecs = {"activation": self.forward_codec, "gradient": self.backward_codec}
        costs = {direction: codec_format(codec).core_nanoseconds for direction, codec in codecs.items()}
        return packing_seconds(len(self.blocks), 1, dict.fromkeys(codecs, ELEMENTS), costs)

    def run(self, window: int = WINDOW) -> Timeline:
        links = [
            LinkRate(up=up * 125e3, down=down * 125e3, latency=self.latency)
            for up, down in zip(self.up, self.down, strict=True)
        ]
        interfaces = [LinkRate(up=rate * 125e3) for rate in self.uploads]
        forward = [count * each for count, each in zip(self.blocks, self.a_block, strict=True)]
        packing = self.packing
        return simulate(
            schedule(len(self.blocks), 1, MANY, window),
            lambda chunk, _: forward[chunk] + packing[chunk] / 2,
            lambda chunk, _: 2 * forward[chunk] + packing[chunk] / 2,
            network=Network(len(self.blocks), links, interfaces),
            sizes={
                Kind.FORWARD: ELEMENTS * BITS[self.forward_codec] / 8,
                Kind.BACKWARD: ELEMENTS * BITS[self.backward_codec] / 8,
            },
            swap=True,
        )

    def view(self, window: int = WINDOW) -> RunView:
        """As nodes would have reported it."""
        timeline = self.run(window)
        stages = []
        for number, (busy, blocks) in enumerate(zip(timeline.busy, self.blocks, strict=True)):
            packs = MANY * self.packing[number] / timeline.total
            share = busy / timeline.total - packs
            one = stage(number, blocks=blocks, forward=share / 3, backward=2 * share / 3, encode=packs)
            stages.append(replace(one, device=self.device))
        links: list[LinkView] = []
        for low in range(len(self.blocks) - 1):
            for source, target, capacity, codec in (
                (low, low + 1, self.up[low], self.forward_codec),
                (low + 1, low, self.down[low], self.backward_codec),
            ):
                mbit = MANY * ELEMENTS * BITS[codec] / 1e6 / timeline.total
                if self.uploads:
                    # Links that take turns are each measured at their part of what they share.
                    both = sum(BITS[x] for x in self._sent_by(source))
                    capacity = min(capacity, self.uploads[source] * BITS[codec] / both)
                measured = link(source, target, mbit, capacity, 2 * self.latency, codec)
                links.append(measured)
        return replace(
            seen(stages, links, seconds=timeline.total),
            microbatches=MANY,
            forward_codec=self.forward_codec,
            backward_codec=self.backward_codec,
        )

    def _sent_by(self, number: int) -> Sequence[str]:
        forward = [self.forward_codec] if number + 1 < len(self.blocks) else []
        return [*forward, *([self.backward_codec] if number > 0 else [])]

    def with_change(self, sentence: str) -> "Situation":
        """The change that a sentence proposes, made."""
        changed = self
        if found := re.search(r"pipeline\.split = \[([\d, ]+)\]", sentence):
            return replace(self, blocks=tuple(int(count) for count in found[1].split(",")))
        for new, ways in re.findall(r"`\S+` to `(\S+)` (forward and backward|forward|backward)", sentence):
            if "forward" in ways:
                changed = replace(changed, forward_codec=new)
            if "backward" in ways:
                changed = replace(changed, backward_codec=new)
        assert changed != self, sentence
        return changed


EVEN = Situation(blocks=(4, 4, 4), a_block=(0.005,) * 3, up=(1000.0,) * 2, down=(1000.0,) * 2)
SITUATIONS = {
    "one way": (
        replace(EVEN, up=(1000.0, 100.0), forward_codec="fp32"),
        r"^link 1 to 2 is full: \d+ % of 100 Mbit/s; stages .* `fp32` to `fixed-8` forward would",
    ),
    "the way back": (
        replace(EVEN, down=(40.0, 1000.0)),
        r"^link 1 to 0 is full: \d+ % of 40 Mbit/s; .* `fixed-8` to `fixed-6` backward would",
    ),
    "few bits on processors": (
        replace(EVEN, down=(40.0, 1000.0), backward_codec="fixed-6"),
        r"^link 1 to 0 is full: \d+ % of 40 Mbit/s; .* `fixed-6` to `tah` backward would",
    ),
    "few bits on GPUs": (
        replace(EVEN, down=(40.0, 1000.0), backward_codec="fixed-6", device=GPU),
        r"^link 1 to 0 is full: \d+ % of 40 Mbit/s; .* `fixed-6` to `trellis-4.41` backward would",
    ),
    "few bits on processors that have the time": (
        replace(EVEN, down=(20.0, 1000.0), backward_codec="fixed-6"),
        r"^link 1 to 0 is full: \d+ % of 20 Mbit/s; .* `fixed-6` to `trellis-4.41` backward would",
    ),
    "both ways": (
        replace(EVEN, up=(100.0, 1e3), down=(100.0, 1e3), forward_codec="fp32", backward_codec="fp32"),
        r"^link (0 to 1|1 to 0) (is full|sets the pace): .* `fp32` to `fixed-8` forward and backward would",
    ),
    "an upload that links share": (
        replace(EVEN, uploads=(60.0, 60.0, 60.0)),
        r"^stage 1 sends [\d.]+ Mbit/s of about [\d.]+ Mbit/s to stages 0 and 2 together: "
        r".* `fixed-8` to `fixed-6` backward would",
    ),
    "a slow machine": (
        replace(EVEN, a_block=(0.005, 0.015, 0.005)),
        r"^stage 1 is the slowest: it computes \d\d % of the time; .* `pipeline.split = ",
    ),
    "an uneven split": (
        replace(EVEN, blocks=(2, 2, 8)),
        r"^stage 2 is the slowest: it computes \d\d % of the time; .* `pipeline.split = \[4, 4, 4\]` would",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_remedy_gives_what_it_promises(name: str) -> None:
    situation, words = SITUATIONS[name]
    sentence = bottleneck(situation.view(), BITS, (0.0, 0.0))[0]
    assert re.search(words, sentence), sentence
    promised = float(re.findall(r"would give about ([\d.]+) x", sentence)[0])
    given = situation.run().total / situation.with_change(sentence).run().total
    assert given > 1.05
    assert 0.88 * given <= promised <= 1.1 * given, (sentence, given)


def test_what_is_not_proposed_on_processors_would_not_help() -> None:
    """`trellis-4.41` takes less room than `tah` and has a smaller error; its packing eats that."""
    situation, _ = SITUATIONS["few bits on processors"]
    assert situation.run().total < 1.1 * replace(situation, backward_codec="trellis-4.41").run().total


def test_a_window_gives_no_more_than_at_most() -> None:
    far = replace(EVEN, latency=0.15)
    (sentence, *_) = bottleneck(far.view(window=0), BITS, (0.0, 0.0))
    assert sentence.startswith(
        "tensors are on their way: no link is full, and a round trip from stage 0 to 1"
    )
    most = float(re.findall(r"at most ([\d.]+) x", sentence)[0])
    best = max(far.run(window=0).total / far.run(window=window).total for window in (2, 8, 24))
    assert 1.2 < best <= most
