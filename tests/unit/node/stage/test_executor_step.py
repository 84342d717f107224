"""What a stage sends, keeps and refuses, with which codecs; an aborted step leaves nothing behind."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event

import pytest
import torch
from torch import Tensor

from node.config.schema import (
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    TrainingSection,
)
from node.model.labels import BatchPart
from node.run_file.validate import problems
from node.schedule.placement import chunk_units, hops
from node.schedule.routing import target_stage
from node.stage.executor import StageExecutor, UnitState
from node.stage.inbox import LinksIO, StepInterrupted
from node.stage.stage_model import StageModel
from node.stage.stage_plans import StageStorage
from node.state.serialization import deserialize_unit, serialize_unit
from node.telemetry.clock import StageClock
from node.tuning.memory import stage_storages
from node.tuning.storage_choice import chosen_config, storage_named
from node.view.explain import explain, framed_bytes
from tests.support.memory_pipeline import MemoryPipeline, reference_run, trained
from tests.support.run_harness import TINY
from wire.codecs.base import Codec
from wire.codecs.formats import codec_format
from wire.codecs.host_copies import Mark
from wire.errors import NonFiniteError, ProtocolViolationError
from wire.spec import Direction, TensorKey

CONFIG = RunConfig(
    run=RunSection(steps=8, seed=3),
    model=ModelSection(layers=4, hidden=32, heads=4, kv_heads=4, ffn=48, vocab=256, sequence=16, tied=True),
    training=TrainingSection(global_batch=4, microbatch=1, lr=1e-2, warmup_steps=2),
    pipeline=PipelineSection(stages=3, window=1, head="last", forward_codec="fp32", backward_codec="fp32"),
)
INTERLEAVED = replace(CONFIG, pipeline=replace(CONFIG.pipeline, stages=2, chunks=2))
CODED = replace(CONFIG, pipeline=replace(CONFIG.pipeline, forward_codec="tah", backward_codec="fixed-8"))
HEAD_FIRST = replace(CODED, pipeline=replace(CODED.pipeline, head="first"))
TWO_STAGES = replace(HEAD_FIRST, pipeline=replace(HEAD_FIRST.pipeline, stages=2))
RING_HEAD_FIRST = replace(TWO_STAGES, pipeline=replace(TWO_STAGES.pipeline, chunks=2))
ALONE = replace(CONFIG, pipeline=replace(CONFIG.pipeline, stages=1))


@pytest.fixture
def stages() -> Iterator[MemoryPipeline]:
    with MemoryPipeline(CONFIG) as pipeline:
        yield pipeline


@pytest.mark.parametrize(
    "config",
    [CONFIG, INTERLEAVED, CODED, HEAD_FIRST, TWO_STAGES, RING_HEAD_FIRST, ALONE],
    ids=["plain", "ring", "coded", "head-first", "two-stages", "ring-head-first", "alone"],
)
def test_a_step_sends_what_config_explain_says_and_releases_all_it_took(config: RunConfig) -> None:
    with MemoryPipeline(config) as stages:
        stages.train(1)
        sent: dict[tuple[int, int, str], list[int]] = {}
        for stage, io in enumerate(stages.ios):
            assert io.held == set()
            for key, size in io.sent:
                flow = (stage, target_stage(key, len(stages.ios)), key.direction.name.lower())
                sent.setdefault(flow, []).append(framed_bytes(size))
    expected = {
        (flow.sender, flow.receiver, flow.what): (flow.tensors, flow.bytes) for flow in explain(config).flows
    }
    assert {flow: (len(sizes), sum(sizes)) for flow, sizes in sent.items()} == expected


def test_a_tied_gradients_sum_takes_the_place_of_the_share_that_came(
    stages: MemoryPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is as large as the embedding."""
    transfer = stages.executors[0]._transfer
    finish, send, places = transfer.finish, transfer.send, dict[Direction, int]()

    def finished(key: TensorKey) -> Tensor:
        tensor = finish(key)
        places[key.direction] = tensor.data_ptr()
        return tensor

    def sending(key: TensorKey, codec: Codec, tensor: Tensor, mark: Mark | None, io: LinksIO) -> None:
        places[key.direction] = tensor.data_ptr()
        send(key, codec, tensor, mark, io)

    monkeypatch.setattr(transfer, "finish", finished)
    monkeypatch.setattr(transfer, "send", sending)
    stages.train(1)
    assert places[Direction.TIED_SHARE] == places[Direction.TIED_SUM]


def test_only_tensors_of_this_placement_are_expected(stages: MemoryPipeline) -> None:
    first, middle, last = stages.executors
    size = 4 * 16 * 32
    tied = 4 * 256 * 32

    def key(direction: Direction, boundary: int = 0, microbatch: int = 0) -> TensorKey:
        return TensorKey(1, 0, microbatch, boundary, direction)

    header = middle.expected_bytes(key(Direction.ACTIVATION))
    assert header is not None and size <= header <= size + 64
    assert last.expected_bytes(key(Direction.ACTIVATION, boundary=1)) == header
    assert first.expected_bytes(key(Direction.GRADIENT, boundary=0)) == header
    share = first.expected_bytes(key(Direction.TIED_SHARE))
    assert share is not None and tied <= share <= tied + 64
    assert last.expected_bytes(key(Direction.TIED_SUM)) == share
    for executor, refused in [
        (first, key(Direction.ACTIVATION)),
        (first, key(Direction.ACTIVATION, boundary=-1)),
        (first, key(Direction.GRADIENT, boundary=1)),
        (first, key(Direction.TIED_SUM)),
        (first, key(Direction.TIED_SHARE, microbatch=1)),
        (first, key(Direction.TIED_SHARE, boundary=1)),
        (middle, key(Direction.ACTIVATION, boundary=1)),
        (middle, key(Direction.ACTIVATION, microbatch=4)),
        (middle, key(Direction.ACTIVATION, microbatch=-1)),
        (middle, key(Direction.TIED_SHARE)),
        (last, key(Direction.GRADIENT, boundary=2)),
        (last, key(Direction.ACTIVATION, boundary=4)),
        (last, key(Direction.TIED_SHARE)),
        (last, key(Direction.TIED_SUM, microbatch=123456)),
        (last, key(Direction.TIED_SUM, boundary=99)),
    ]:
        assert executor.expected_bytes(refused) is None


def test_with_the_head_first_the_ring_is_a_boundary_and_no_tied_gradient_is_expected() -> None:
    with MemoryPipeline(HEAD_FIRST) as stages:
        first, _, last = stages.executors
        assert BatchPart.LABELS in first.needs and BatchPart.LABELS not in last.needs
        hidden = first.expected_bytes(TensorKey(1, 0, 0, 2, Direction.ACTIVATION))
        assert hidden is not None and hidden < 4 * 16 * 32
        assert last.expected_bytes(TensorKey(1, 0, 0, 2, Direction.GRADIENT)) is not None
        for executor in stages.executors:
            for direction in (Direction.TIED_SHARE, Direction.TIED_SUM):
                assert executor.expected_bytes(TensorKey(1, 0, 0, 0, direction)) is None
        assert first.expected_bytes(TensorKey(1, 0, 0, 3, Direction.ACTIVATION)) is None


@pytest.mark.parametrize("config", [HEAD_FIRST, TWO_STAGES, RING_HEAD_FIRST])
def test_with_the_head_first_codecs_are_where_the_reference_has_them(config: RunConfig) -> None:
    expected, weights = reference_run(config, 3, chunk_units(config, config.pipeline.stages))
    for windows in ((), (3,) * hops(config, config.pipeline.stages)):
        with MemoryPipeline(config) as stages:
            for executor in stages.executors:
                executor.use_windows(windows)
            assert stages.train(3) == expected
            assert stages.weights_sha256() == weights


def test_a_step_called_off_runs_again_with_the_same_bits(stages: MemoryPipeline) -> None:
    """Once in the middle, once after every vote: neither leaves a trace in weights, moments or gradients."""
    expected, weights = reference_run(CONFIG, 4)
    assert stages.train(1) == expected[:1]

    inbox, io = stages.inboxes[1], stages.ios[1]
    takes = 0
    take = io.take

    def call_off_at_the_fifth(key: TensorKey) -> Tensor:
        nonlocal takes
        takes += 1
        if takes == 5:
            inbox.interrupt("the epoch is over")
        return take(key)

    io.take = call_off_at_the_fifth  # type: ignore[method-assign]  # the fault of this test
    with pytest.raises(StepInterrupted):
        stages.outcomes(epoch=1)
    del io.take
    stages.forget()

    stages.outcomes(epoch=2)
    stages.forget()
    assert [stages.commit(stages.outcomes(epoch=3)) for _ in range(3)] == expected[1:]
    assert stages.weights_sha256() == weights


def test_a_stage_waits_for_nothing_once_called_off(stages: MemoryPipeline) -> None:
    """A stage whose neighbour never sends is freed by the interruption, with its reason."""
    last = stages.executors[2]
    waiting = Event()
    wait_any = stages.ios[2].wait_any

    def signal(keys: Sequence[TensorKey], *, or_change: bool = False) -> None:
        waiting.set()
        wait_any(keys, or_change=or_change)

    stages.ios[2].wait_any = signal  # type: ignore[method-assign]  # observes only
    rows = torch.zeros(4, 16, dtype=torch.int64).numpy()
    future = stages.submit(lambda: last.run_step(1, 0, stages.ios[2], {BatchPart.LABELS: rows}))
    assert waiting.wait(20)
    stages.inboxes[2].interrupt("node three left")
    with pytest.raises(StepInterrupted, match="node three left"):
        future.result(20)


def test_state_moves_to_another_split_without_a_bit_lost() -> None:
    """What five stages copied out after three steps, two stages of two chunks go on from."""
    five = replace(CONFIG, model=replace(CONFIG.model, layers=5), pipeline=replace(CONFIG.pipeline, stages=5))
    two = replace(five, pipeline=replace(five.pipeline, stages=2, chunks=2, window=0))
    expected, weights = reference_run(five, 6)
    with MemoryPipeline(five) as before:
        assert before.train(3) == expected[:3]
        files = {unit: serialize_unit(tensors) for unit, tensors in before.state().items()}

    def fetch(unit: str) -> UnitState:
        return deserialize_unit(files[unit])

    with MemoryPipeline(two) as after:
        after.restore(3, fetch)
        assert after.train(3) == expected[3:]
        assert after.weights_sha256() == weights


def whole_state(executor: StageExecutor) -> dict[str, dict[str, torch.Tensor]]:
    """Each unit's tensors, copied."""
    copy = executor.copy_state()
    return {unit: copy.whole(unit) for unit in copy.units}


def test_a_stage_keeps_its_state_only_for_the_same_place(stages: MemoryPipeline) -> None:
    stages.train(2)
    middle = stages.executors[1]
    assert middle.place(1, 3) == 2
    before = middle.copy_state()
    middle.restore(2, lambda unit: pytest.fail(f"{unit} is here already"))
    assert middle.copy_state().units == before.units == ("block.0001", "block.0002")
    assert middle.place(2, 3) == -1
    middle.restore(0, lambda unit: pytest.fail(f"{unit} comes from the seed"))
    assert middle.units == ("block.0003", "head")
    fresh = middle.copy_state()
    assert all(int(fresh.whole(unit)["step"]) == 0 for unit in fresh.units)


@pytest.mark.parametrize("config", [CONFIG, CODED], ids=["raw", "coded"])
def test_a_tensor_that_is_not_finite_is_named(config: RunConfig) -> None:
    with MemoryPipeline(config) as stages:
        stages.train(1)
        state = whole_state(stages.executors[1])
        for tensors in state.values():
            for name, tensor in tensors.items():
                if name.endswith("query.weight"):
                    tensor[0, 0] = math.nan
        stages.executors[1].place(0, 3)
        stages.executors[1].place(1, 3)
        stages.executors[1].restore(1, state.__getitem__)
        with pytest.raises(NonFiniteError, match="activation to be sent over boundary 1"):
            stages.outcomes()


def test_a_loss_that_is_not_finite_is_voted_as_such() -> None:
    """Nothing is sent after the head, so only the vote can tell."""
    with MemoryPipeline(ALONE) as alone:
        (executor,) = alone.executors
        state = whole_state(executor)
        state["head"]["parameter.output.weight"][0, 0] = math.inf
        executor.place(0, 2)
        executor.place(0, 1)
        executor.restore(1, state.__getitem__)
        (outcome,) = alone.outcomes()
        assert outcome.loss is not None and not math.isfinite(outcome.loss)


# ---- codecs that the coordinator plans, at a stage: those that the run file allows, each at its boundary


CPU = torch.device("cpu")
PLANNED = RunConfig(
    model=TINY,
    training=TrainingSection(global_batch=4, microbatch=2),
    pipeline=PipelineSection(stages=3, forward_codec="auto", backward_codec="auto", min_bits=3.0),
)
SHAPE = (2, TINY.sequence, TINY.hidden)


def stage(config: RunConfig = PLANNED) -> StageExecutor:
    """The one in the middle."""
    executor = StageExecutor(config, CPU, StageClock(), StageModel(config, CPU))
    executor.place(1, 3)
    return executor


def test_each_boundary_has_its_own_codec() -> None:
    executor = stage()
    executor.use_codecs(("trellis-3", "trellis-6"), ("dither-4", "dither-8"))
    received = TensorKey(1, 0, 0, 0, Direction.ACTIVATION), TensorKey(1, 0, 0, 1, Direction.GRADIENT)
    sizes = [executor.expected_bytes(key) for key in received]
    assert sizes == [codec_format(name).packed_bytes(SHAPE) for name in ("trellis-3", "dither-8")]
    assert executor.codec_name(Direction.ACTIVATION) == "trellis-6"
    assert executor.codec_name(Direction.GRADIENT) == "dither-4"
    # A placement forgets them.
    executor.place(1, 3)
    assert executor.codec_name(Direction.ACTIVATION) == "trellis-4.41"


@pytest.mark.parametrize(
    ("activations", "gradients", "why"),
    [
        ((), (), "expected 2 of each"),
        (("trellis-4",) * 3, ("dither-4",) * 3, "expected 2 of each"),
        (("trellis-2.5", "trellis-4"), ("dither-4",) * 2, "allows only"),
        (("fp32", "trellis-4"), ("dither-4",) * 2, "allows only"),
        (("trellis-4",) * 2, ("dither-4", "no such codec"), "allows only"),
    ],
)
def test_what_the_run_file_does_not_allow_is_refused(
    activations: tuple[str, ...], gradients: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ProtocolViolationError, match=why):
        stage().use_codecs(activations, gradients)


def test_a_run_with_set_codecs_takes_no_plan() -> None:
    fixed = replace(PLANNED, pipeline=PipelineSection(stages=3))
    stage(fixed).use_codecs((), ())
    with pytest.raises(ProtocolViolationError, match="expected 0 of each"):
        stage(fixed).use_codecs(("trellis-4",) * 2, ("dither-4",) * 2)


# ---- packed activations in a pipeline: the unsplit trainer's bits, whatever the stages keep


STEPS = 2
STORED = RunConfig(
    run=RunSection(steps=STEPS, seed=7),
    model=ModelSection(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=4, microbatch=1, lr=1e-2, warmup_steps=1),
    pipeline=PipelineSection(stages=3, window=0, forward_codec="fp32", backward_codec="fp32"),
)


@pytest.mark.parametrize(
    ("family", "storage", "pipeline"),
    [
        ("llama", StorageSection(preset="agoq"), {"window": 2}),
        ("gpt2", StorageSection(preset="agoq", bits_by_stage=True), {}),
        ("llama", StorageSection(preset="compact", bits_by_stage=True), {"chunks": 2}),
        ("llama", StorageSection(norm_input="5", attention="recompute", attention_output="recompute"), {}),
    ],
    ids=["agoq-window2", "agoq-by-stage", "compact-by-stage-x2", "recompute"],
)
def test_a_pipeline_gives_the_unsplit_models_bits(
    family: str, storage: StorageSection, pipeline: dict[str, int]
) -> None:
    config = replace(
        STORED,
        model=replace(STORED.model, family=family, layers=3 * pipeline.get("chunks", 1)),
        storage=storage,
        pipeline=replace(STORED.pipeline, **pipeline),
    )
    assert problems(config) == []
    expected = reference_run(config, STEPS, groups=chunk_units(config, 3))
    assert expected[0][-1] != reference_run(replace(config, storage=StorageSection()), STEPS)[0][-1]
    assert trained(config, STEPS) == expected


def test_stages_that_the_coordinator_chose_storages_for_have_the_bits_of_a_run_file_that_says_so() -> None:
    config = replace(STORED, storage=StorageSection(allow=("ffn_input:8", "ffn_input:4")))
    assert problems(config) == []
    names = ["none/8/none/none", "none/none/none/none", "none/8/none/none"]
    chosen = [chosen_config(config, storage_named(config, name)) for name in names]

    def weights(one: RunConfig, chosen: tuple[str, ...]) -> str:
        with MemoryPipeline(one) as stages:
            for executor in stages.executors:
                executor.use_storages(chosen)
                executor.restore(0, lambda unit: {})
            stages.train(STEPS)
            return stages.weights_sha256()

    mixed = weights(config, tuple(names))
    assert weights(config, tuple(names)) == mixed
    alike = weights(config, ("none/8/none/none",) * 3)
    assert alike == reference_run(chosen[0], STEPS, groups=chunk_units(config, 3))[1]
    plain = reference_run(chosen[1], STEPS)[1]
    assert weights(config, (names[1],) * 3) == plain
    assert len({mixed, alike, plain}) == 3


def test_a_state_that_was_built_with_another_storage_is_forgotten() -> None:
    config = replace(STORED, storage=StorageSection(allow=("8",)))
    narrow = ("8/8/none/none",) * 3
    with MemoryPipeline(config) as stages:
        executor = stages.executors[1]
        executor.use_storages(narrow)
        assert executor.state_step == -1
        executor.restore(0, lambda unit: {})
        executor.use_storages(narrow)
        assert executor.state_step == 0
        assert executor.storage.config.storage.norm_input == "8"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("8/8/none/none",) * 2, "chooses 2 storages for 3 stages"),
        ((), "chooses 0 storages for 3 stages"),
        (("4/4/none/none",) * 3, "'4/4/none/none', which this run's file does not allow"),
    ],
)
def test_a_coordinator_that_chooses_what_is_not_allowed_is_refused(
    names: tuple[str, ...], message: str
) -> None:
    storage = StageStorage(replace(STORED, storage=StorageSection(allow=("8",))))
    with pytest.raises(ProtocolViolationError, match=message):
        storage.choose(names, 1, 3)
    with pytest.raises(ProtocolViolationError, match="chooses 3 storages"):
        StageStorage(STORED).choose(("8/8/none/none",) * 3, 1, 3)


def test_stages_differ_where_bits_go_by_stage() -> None:
    config = replace(STORED, storage=StorageSection(preset="agoq", bits_by_stage=True))
    assert [storage.ffn_input for storage in stage_storages(config, 3)] == ["4", "6", "8"]
