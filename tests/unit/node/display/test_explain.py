"""`thinwire config explain` against what is counted by packing and framing real tensors."""

import json
import tomllib
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from node.cli.main import main
from node.config.schema import (
    ModelSection,
    PipelineSection,
    RunConfig,
    StorageSection,
    SyncSection,
    TrainingSection,
)
from node.display.explain import (
    RATES_MBIT,
    explanation_json,
    explanation_text,
    transfer_seconds,
)
from node.model.chunk import build_chunk
from node.model.storage import stored_bytes
from node.run_file.loader import to_json
from node.schedule.placement import decided, split_units
from node.schedule.schedule import dependencies, schedule
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_bytes, stage_memory, stage_storages
from node.view.explain import Explanation, TextPlan, explain, framed_bytes
from tests.support.cases import each
from wire.codecs.registry import codec
from wire.frames import FRAME_BYTES, HEADER_BYTES

SMALL = RunConfig(
    model=ModelSection(layers=6, hidden=96, heads=4, kv_heads=2, ffn=128, sequence=24),
    training=TrainingSection(global_batch=12, microbatch=3, warmup_steps=2),
    pipeline=PipelineSection(stages=3),
)


def with_pipeline(*, tied: bool = False, **values: int | str | tuple[int, ...]) -> RunConfig:
    pipeline = replace(SMALL.pipeline, **values)  # type: ignore[arg-type]  # keys and values are the section's
    return replace(SMALL, pipeline=pipeline, model=replace(SMALL.model, tied=tied))


def counted_by_packing(config: RunConfig) -> dict[tuple[int, int, str], int]:
    """Bytes by (sender, receiver, kind): walk every stage's order, encode a tensor, cut it into frames."""
    pipeline, model = config.pipeline, config.model
    stages, chunks = pipeline.stages, pipeline.chunks
    shape = (config.training.microbatch, model.sequence, model.hidden)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    names = {pipeline.forward_codec, pipeline.backward_codec}
    framed = {name: frames_of(codec(name).encode(hidden).numel()) for name in names}
    sent: Counter[tuple[int, int, str]] = Counter()
    first = pipeline.head == "first"
    orders = schedule(stages, chunks, config.microbatches, pipeline.first_window, head_first=first)
    for stage, order in enumerate(orders):
        for action in order:
            made = dependencies(action, stage, stages, chunks, head_first=first).makes
            if made is None:
                continue
            forward = action.kind.value == "forward"
            name = pipeline.forward_codec if forward else pipeline.backward_codec
            receiver = (stage + 1 if forward else stage - 1) % stages
            what = "activation" if forward else "gradient"
            sent[stage, receiver, what] += framed[name]
    if model.tied and stages > 1 and not first:
        weight = codec("fp32").encode(torch.zeros(model.vocab, model.hidden)).numel()
        sent[stages - 1, 0, "tied_share"] = frames_of(weight)
        sent[0, stages - 1, "tied_sum"] = frames_of(weight)
    return {key: count for key, count in sent.items() if key[0] != key[1]}


def frames_of(packed: int) -> int:
    """Cut one tensor into frames the plain way."""
    total = 0
    while packed > 0:
        payload = min(packed, FRAME_BYTES - HEADER_BYTES)
        total += HEADER_BYTES + payload
        packed -= payload
    return total


@each(
    ("stages", "chunks", "window", "tied", "head", "codecs"),
    [
        (1, 1, 0, True, "auto", ("tah", "fixed-8")),
        (2, 1, 0, False, "auto", ("fp32", "bf16")),
        (2, 2, 0, True, "last", ("fixed-4", "tah")),
        (2, 1, 1, True, "first", ("tah", "fixed-8")),
        (2, 3, 1, False, "auto", ("tah", "fixed-8")),
        (3, 1, 2, True, "last", ("tah", "fixed-8")),
        (3, 1, 2, True, "first", ("fp32", "bf16")),
        (3, 2, 0, True, "first", ("fixed-4", "tah")),
    ],
)
def test_bytes_are_those_of_packed_and_framed_tensors(
    stages: int, chunks: int, window: int, tied: bool, head: str, codecs: tuple[str, str]
) -> None:
    config = with_pipeline(
        stages=stages,
        chunks=chunks,
        window=window,
        tied=tied,
        head=head,
        forward_codec=codecs[0],
        backward_codec=codecs[1],
    )
    explanation = explain(config)
    found = {(flow.sender, flow.receiver, flow.what): flow.bytes for flow in explanation.flows}
    assert found == counted_by_packing(config)


def test_a_tensor_of_several_frames_pays_each_header() -> None:
    payload = FRAME_BYTES - HEADER_BYTES
    for packed, frames in ((1, 1), (payload, 1), (payload + 1, 2), (3 * payload, 3)):
        assert framed_bytes(packed) == packed + frames * HEADER_BYTES == frames_of(packed)


def test_flows_add_up_to_link_directions() -> None:
    explanation = explain(with_pipeline(stages=2, chunks=2, tied=True))
    assert {(link.sender, link.receiver) for link in explanation.directions} == {(0, 1), (1, 0)}
    assert sum(link.bytes for link in explanation.directions) == sum(flow.bytes for flow in explanation.flows)
    assert explanation.busiest is not None
    assert explanation.busiest.bytes == max(link.bytes for link in explanation.directions)


def test_baselines_are_the_same_elements_at_four_and_two_bytes() -> None:
    tensor = 3 * 24 * 96
    for flow in explain(SMALL).flows:
        assert flow.tensors == SMALL.microbatches == 4
        assert flow.elements == 4 * tensor
        assert (flow.bytes_fp32, flow.bytes_bf16) == (16 * tensor, 8 * tensor)
        assert flow.bits_per_element == 8 * flow.bytes / flow.elements


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_parameters_are_those_of_the_built_chunks(family: str, tied: bool) -> None:
    config = with_pipeline(tied=tied, head="last")
    config = replace(config, model=replace(config.model, family=family))
    explanation = explain(config)
    for plan, units in zip(explanation.stages, split_units(config.model, 3), strict=True):
        assert plan.units == units
        chunk = build_chunk(config.model, units, 0, torch.device("cpu"))
        assert plan.parameters == sum(parameter.numel() for parameter in chunk.parameters())
    assert explanation.parameters == sum(plan.parameters for plan in explanation.stages)


def test_the_values_are_a_run_file_with_the_same_values() -> None:
    lines = explanation_text(explain(SMALL)).splitlines()
    values = [line.removesuffix("  *") for line in lines[: lines.index("")]]
    assert tomllib.loads("\n".join(values)) == json.loads(to_json(SMALL))


def test_stored_activations_are_reported_by_kind_and_stage() -> None:
    storage = StorageSection(preset="agoq", bits_by_stage=True)
    config = replace(SMALL, storage=storage, pipeline=replace(SMALL.pipeline, window=0))
    explanation = explain(config)
    lines = explanation_text(explanation).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("a block keeps for backward"))
    assert "1 U = hidden states of a microbatch at 2 bytes = 0.014 MB" in lines[start]
    for stage, (plan, line) in enumerate(zip(explanation.stages, lines[start + 2 :], strict=False)):
        kept = stored_bytes(config.model, config.training, stage_storages(config, 3)[stage])
        assert plan.stored == vars(kept)
        unit = 2 * 3 * 24 * 96
        form = ("4", "6", "8")[stage]
        assert f"{form}: {kept.norm_input / unit:.3f} U" in line
        assert f"{kept.total / unit:.3f} U" in line and line.endswith(f"{kept.total / 1e6:.3f} MB")
    whole = json.loads(explanation_json(explanation))
    assert [row["storage"]["ffn_input"] for row in whole["stages"]] == ["4", "6", "8"]
    assert [sum(row["stored"].values()) for row in whole["stages"]] == [
        sum(plan.stored.values()) for plan in explanation.stages if plan.stored is not None
    ]
    assert "activations: kept by autograd" in explanation_text(explain(SMALL))


@pytest.mark.parametrize("storage", ["off", "agoq"])
def test_the_coordinator_uses_the_memory_of_stages(storage: str) -> None:
    config = replace(SMALL, storage=StorageSection(preset=storage))
    explanation = explain(config)
    for on_cpu in (True, False):
        stages = stage_memory(config, 3, Devices(on_cpu=on_cpu))
        assert tuple(stage.total for stage in stages) == stage_bytes(config, 3, Devices(on_cpu=on_cpu))
        found = [need.cpu if on_cpu else need.gpu for need in explanation.memory]
        assert [(need.total, need.state, need.kept) for need in found] == [
            (stage.total, stage.state, stage.kept) for stage in stages
        ]
    rows = json.loads(explanation_json(explanation))["memory"]
    assert rows == [asdict(need) for need in explanation.memory]
    assert rows[0]["cpu"]["total"] > rows[0]["gpu"]["total"] > rows[0]["gpu"]["state"] > 0


def test_memory_counts_what_a_codec_remembers_of_the_text() -> None:
    config = with_pipeline(forward_codec="aqsgd-4")
    stages = stage_memory(config, 3, Devices(), windows=100)
    assert [need.cpu.state for need in explain(config, TextPlan(samples=100)).memory] == [
        stage.state for stage in stages
    ]
    assert stages[1].state > explain(config).memory[1].cpu.state


def test_json_holds_every_number() -> None:
    explanation = explain(with_pipeline(tied=True, head="last"))
    whole = json.loads(explanation_json(explanation))
    assert whole["config"]["pipeline"]["stages"] == 3
    assert "pipeline.stages" not in whole["defaults"]
    assert "pipeline.window" in whole["defaults"]
    assert [flow["bytes"] for flow in whole["flows"]] == [flow.bytes for flow in explanation.flows]
    for link, direction in zip(whole["links"], explanation.directions, strict=True):
        assert link["bytes"] == direction.bytes
        assert link["seconds_at_mbit"] == {
            str(rate): transfer_seconds(direction.bytes, rate) for rate in RATES_MBIT
        }


def test_a_tied_models_head_is_where_fewer_bytes_cross_the_network() -> None:
    small, large = with_pipeline(tied=True), with_pipeline(tied=True, stages=2)
    large = replace(large, model=replace(large.model, vocab=8))
    for config, first in ((small, True), (large, False)):
        explanation = explain(config)
        head = explanation.head
        assert head is not None and head.first == first == (head.boundary_bytes <= head.exchange_bytes)
        flows = {flow.what for flow in explanation.flows}
        assert flows == {"activation", "gradient"} | (set() if first else {"tied_share", "tied_sum"})
        place = "first" if first else "last"
        assert f"head     on the {place} stage: " in explanation_text(explanation)
        assert explain(replace(config, pipeline=decided(config).pipeline)).flows == explanation.flows
        assert decided(config).pipeline.head == place
    assert explain(SMALL).head is None


def test_a_single_stage_has_no_links() -> None:
    explanation: Explanation = explain(with_pipeline(stages=1, tied=True))
    assert explanation.flows == () and explanation.busiest is None
    assert "a single stage" in explanation_text(explanation)
    assert json.loads(explanation_json(explanation))["busiest"] is None


def test_bytes_between_rows_are_shown() -> None:
    """A reduce-scatter and an all-gather of the packed gradient: 2 (R - 1) / R of it."""
    config = replace(SMALL, pipeline=replace(SMALL.pipeline, groups=4, sync_codec="fixed-8"))
    assert "groups   4, of " in explanation_text(explain(config))
    sent = explain(config).sync_bytes
    assert sent.keys() == {2, 3, 4}
    assert sent[3] / sent[2] == pytest.approx(4 / 3, rel=0.05)
    assert sent[4] / sent[2] == pytest.approx(3 / 2, rel=0.05)
    assert explain(replace(config, pipeline=replace(config.pipeline, replicas=1))).sync_bytes == {}


def test_bytes_of_rounds_are_shown_beside_those_of_exact_steps() -> None:
    config = replace(
        SMALL,
        training=replace(SMALL.training, global_batch=32),
        pipeline=replace(SMALL.pipeline, groups=2, sync_codec="fixed-8"),
        sync=SyncSection(every=4, warmup=50),
    )
    explained = explain(config)
    exact, of_round = explained.sync_bytes[2], explained.round_bytes[2]
    assert 0.4 < of_round / exact < 0.8, "four bits an element, and vectors"
    text = explanation_text(explained)
    part = config.microbatches // 8
    assert "from step 51 on" in text and f"4 local steps of {part} microbatches" in text
    assert "rounds" not in explanation_text(explain(SMALL))


def test_what_a_stage_may_store_is_a_table_of_the_most_and_the_fewest_bits() -> None:
    config = replace(SMALL, storage=StorageSection(allow=("ffn_input:8", "ffn_input:4")))
    lines = explanation_text(explain(config)).splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("storage.allow: 3 ways")]
    words = [line.strip().split("  ")[0] for line in lines[start:]]
    table = words.index("stored")
    assert words[table + 1 : table + 3] == ["all as computed", "ffn_input in 4 bits"]


RUN = """
[run]
steps = 50
[model]
hidden = 32
heads = 4
kv_heads = 4
layers = 4
sequence = 16
[data]
path = "{text}"
shift = false
[training]
global_batch = 8
microbatch = 4
[pipeline]
stages = 4
forward_codec = "aqsgd-4"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("0123456789abcde\n" * 125)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(text=tmp_path / "text.txt"))
    return path


def test_text_and_sample_cache(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", str(run_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # A tenth of the 2000 bytes is held out; the 1800 others hold 112 windows of 16 and a label.
    assert (
        "text     1.8k tokens to train on, 200 held out; 112 samples per pass; 50 steps are 3.57 passes"
        in lines
    )
    one = 112 * (16 * 32 * 2 + 12)
    (cache,) = (line for line in lines if line.startswith("cache    "))
    assert cache.startswith("cache    aqsgd-4 caches up to 116 kB, 232 kB, 232 kB, 116 kB of activations")
    wrapped = " ".join(line.strip() for line in lines)
    assert "a snapshot grows by 348 kB; the first pass takes 16.2 bits per element" in wrapped
    assert main(["config", "explain", str(run_file), "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text["sample_cache"]["stages"] == [one, 2 * one, 2 * one, one]
    assert text["sample_cache"]["snapshot"] == 3 * one
    assert (text["tokens"], text["held_out"], text["samples"]) == (1800, 200, 112)


def test_more_than_the_limit_is_refused(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", str(run_file), "pipeline.cache_gb=2e-4"]) == 2
    error = capsys.readouterr().err
    assert "would keep 0.000232 GB of activations at one of 4 stages (112 samples of 16 x 32)" in error
    assert len(error.splitlines()) == 1


def test_a_text_that_is_elsewhere_is_said_so(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", str(run_file), "data.path=/nowhere/text.txt"]) == 2
    said = capsys.readouterr()
    assert "text     not read: no file or folder /nowhere/text.txt" in said.out
    assert "no file or folder /nowhere/text.txt" in said.err
