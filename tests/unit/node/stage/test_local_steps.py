"""Rounds of local steps: the bits of the unsplit trainer in any number of rows, whatever fails in them."""

import itertools
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SyncSection,
    TrainingSection,
)
from node.model.optimizers import OUTER_PREFIX, PARAMETER_PREFIX
from node.schedule.gradient_groups import RowShare, model_pieces, parts_of_group, piece_bytes, sync_bytes
from node.stage.executor import StageExecutor
from node.stage.passes import AutogradPasses
from node.stage.stage_model import StageModel
from node.state.manifest import LayerFile
from node.state.serialization import deserialize_unit, serialize_unit
from node.state.unit_state import checked_digest
from node.telemetry.clock import StageClock
from node.telemetry.points import At, Phase
from node.training.local_steps import LocalSteps
from node.training.schedule import learning_rate
from tests.support import memory_pipeline
from tests.support.memory_pipeline import CPU, MemoryPipeline, corpus, reference_run, trained
from tests.support.reference_trainer import ReferenceTrainer, Step
from tests.unit.node.stage.test_gradient_sync import ROWS
from wire.errors import NonFiniteError, RunError
from wire.spec import Direction

TRAINED, WARMUP = 3, 1
SYNC = (Direction.SYNC_SHARE, Direction.SYNC_SUM)
CONFIG = RunConfig(
    run=RunSection(steps=8, seed=7),
    model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=8, microbatch=1, lr=1e-2, warmup_steps=1),
    pipeline=PipelineSection(stages=2, forward_codec="fp32", backward_codec="fp32", groups=4),
    sync=SyncSection(every=2, warmup=WARMUP, codec="fixed-4", outer_lr=0.6, outer_momentum=0.9),
)


changed = partial(memory_pipeline.changed, CONFIG)


@cache
def unsplit(config: RunConfig) -> tuple[list[Step], str]:
    return reference_run(config, TRAINED)


@pytest.mark.parametrize(
    ("rows", "codec"),
    [(1, "fp32"), (2, "bf16"), (4, "fixed-4")],
)
def test_rounds_in_any_number_of_rows_have_the_bits_of_the_unsplit_model(rows: int, codec: str) -> None:
    config = changed(sync={"codec": codec})
    assert trained(config, TRAINED, ROWS[rows]) == unsplit(config)


def test_reports_name_the_codec_of_the_step() -> None:
    with MemoryPipeline(CONFIG, rows=ROWS[2]) as stages:
        for codec in (CONFIG.pipeline.sync_codec, CONFIG.sync.codec):
            stages.train(1)
            named = {one.codec_name(way) for one in stages.executors for way in SYNC}
            assert named == {codec}


VARIANTS = {
    "tied, head first, bf16": changed(
        model={"tied": True}, pipeline={"head": "first"}, training={"precision": "bfloat16"}
    ),
    "interleaved": changed(model={"layers": 4}, pipeline={"chunks": 2}, training={"global_batch": 16}),
    "wide window, four local steps": changed(
        training={"global_batch": 16}, pipeline={"window": 3}, sync={"every": 4}
    ),
    "gpt2, one stage, from initial weights, without clipping or momentum": changed(
        model={"family": "gpt2"},
        pipeline={"stages": 1},
        training={"clip": 0.0},
        sync={"warmup": 0, "outer_momentum": 0.0},
    ),
    "adapters": replace(CONFIG, lora=LoraSection(rank=4, dropout=0.1)),
    "muon": changed(model={"family": "gpt2"}, training={"optimizer": "muon"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run_takes_local_steps(name: str) -> None:
    assert trained(VARIANTS[name], TRAINED, ROWS[3]) == unsplit(VARIANTS[name])


def test_local_steps_change_a_run_only_after_its_warmup() -> None:
    exact = unsplit(replace(CONFIG, sync=SyncSection()))
    local = unsplit(CONFIG)
    assert local[0][:WARMUP] == exact[0][:WARMUP]
    assert local[0][WARMUP].loss != exact[0][WARMUP].loss, "the second local step sees other weights"
    assert local[1] != exact[1]


def test_a_round_is_that_many_adamw_steps_of_each_group_and_one_of_the_outer_optimizer() -> None:
    """Against torch's own optimizers, over the groups' gradients from plain autograd."""
    config = changed(
        sync={"codec": "fp32", "warmup": 0, "outer_lr": 0.7}, training={"clip": 0.5, "global_batch": 16}
    )
    trainer, data = ReferenceTrainer(config, corpus(config)), corpus(config)
    start = {id(p): p.detach().clone() for p in trainer.optimizer.parameters}
    mean = {key: torch.zeros_like(value) for key, value in start.items()}
    lr = config.training.lr  # warm-up is one step long
    for group in range(4):
        other = ReferenceTrainer(config, data)
        pairs = list(zip(trainer.optimizer.parameters, other.optimizer.parameters, strict=True))
        own = [mine for _, mine in pairs]
        adamw = torch.optim.AdamW(
            [
                {"params": [p for p in own if p.ndim >= 2], "weight_decay": config.training.weight_decay},
                {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=lr,
            betas=(config.training.beta1, config.training.beta2),
            eps=config.training.eps,
        )
        for part in parts_of_group(config, group, 2):
            for p in own:
                p.grad = None
            for microbatch in part:
                ids = torch.from_numpy(data.batch(0)[microbatch : microbatch + 1].astype("int64"))
                (other.chunks[0].loss(ids[:, :-1], ids[:, 1:]) / len(part)).backward()
            for p in own:
                torch.nn.utils.clip_grad_norm_([p], 0.5)
            adamw.step()
        for theirs, mine in pairs:
            mean[id(theirs)] += (start[id(theirs)] - mine.detach()) / 4
    trainer.train_step()
    for parameter in trainer.optimizer.parameters:
        # Nesterov from a momentum of 0: the change, and 0.9 of it once more.
        expected = start[id(parameter)] - 0.7 * 1.9 * mean[id(parameter)]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=2e-5)


def test_outer_steps_are_those_of_torch() -> None:
    """SGD with Nesterov momentum over the mean changes of three rounds."""
    config = changed(sync={"warmup": 0, "outer_lr": 0.6})
    trainer = ReferenceTrainer(config, corpus(config))
    weights = [p.detach().clone().requires_grad_() for p in trainer.optimizer.parameters]
    sgd = torch.optim.SGD(weights, lr=0.6, momentum=0.9, nesterov=True)
    for _ in range(3):
        trainer.accumulate()
        for mine, theirs in zip(weights, trainer.optimizer.parameters, strict=True):
            mine.grad = trainer.optimizer.gradients.get(theirs).clone()
        sgd.step()
        trainer._local.apply(trainer.step)
        trainer.step += 1
        for mine, theirs in zip(weights, trainer.optimizer.parameters, strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_a_round_leaves_the_first_moment_of_an_adamw_that_takes_the_mean_change() -> None:
    """In as many equal steps, of the same second moment: the next round goes on with it."""
    config = changed(sync={"warmup": 1, "codec": "fp32"})
    training = config.training
    trainer = ReferenceTrainer(config, corpus(config))
    trainer.train(2)
    start = {one: one.detach().double() for one in trainer.optimizer.parameters}
    lr = learning_rate(2, training, config.run.steps)
    trainer.accumulate()
    changes = {one: trainer.optimizer.gradients.get(one).double() for one in trainer.optimizer.parameters}
    trainer._local.apply(2)
    steps = 1 + 2 * 2
    assert set(trainer.optimizer.steps_taken.values()) == {steps}
    for parameter, change in changes.items():
        mean, square = (moment.double() for moment in trainer.optimizer.moments_of(parameter))
        assert mean.any()
        root = (square / (1 - training.beta2**steps)).sqrt() + training.eps
        decay = training.weight_decay * start[parameter] if parameter.ndim >= 2 else 0.0
        taken = 2 * lr * (mean / (1 - training.beta1**steps) / root + decay)
        torch.testing.assert_close(taken, change, rtol=1e-4, atol=1e-8)


def test_a_round_leaves_the_mean_of_the_groups_momentum_to_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(sync={"codec": "fp32"}, training={"optimizer": "muon"})
    trainer = ReferenceTrainer(config, corpus(config))
    optimizer, changes = trainer.optimizer, LocalSteps.changes
    matrices = [
        p for unit in ("block.0000", "block.0001") for p in optimizer.named[unit].values() if p.ndim > 1
    ]
    ends: list[list[Tensor]] = []

    def noted(local: LocalSteps) -> dict[str, dict[str, Tensor]]:
        ends.append([optimizer.moments_of(parameter)[0].clone() for parameter in matrices])
        return changes(local)

    monkeypatch.setattr(LocalSteps, "changes", noted)
    trainer.train(2)
    assert len(ends) == 4 and not torch.equal(ends[0][0], ends[1][0])
    for parameter, momenta in zip(matrices, zip(*ends, strict=True), strict=True):
        (found,) = optimizer.moments_of(parameter)
        torch.testing.assert_close(found, torch.stack(momenta).mean(0), rtol=1e-6, atol=1e-9)


def test_passes_are_told_of_every_change_of_weights_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured passes on a GPU read copies of the weights."""
    told = itertools.count()
    monkeypatch.setattr(AutogradPasses, "weights_changed", lambda _: next(told))
    with MemoryPipeline(CONFIG, rows=ROWS[1]) as stages:
        stages.train(WARMUP)
        assert next(told) == 0
        stages.train(1)
    # On each of two stages after two local steps of four groups, and before all groups but the first.
    assert next(told) == 1 + 2 * (2 * 4 + 3)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("step", "phase"),
    [(1, Phase.FORWARD), (2, Phase.BACKWARD), (1, Phase.LOCAL_STEP), (2, Phase.LOCAL_STEP), (2, Phase.SYNC)],
)
def test_a_round_that_fails_leaves_no_trace(step: int, phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round, which finds the moments of exact steps, and the second."""
    with MemoryPipeline(CONFIG, rows=ROWS[2]) as stages:
        stages.train(step)
        before = stages.state()
        # The rows' threads take numbers from it; in sync each row takes one, else several.
        passed, last = itertools.count(1), 1 if phase is Phase.SYNC else 3

        def fail(at: At, reached: Phase, stage: int, step: int, tensor: object) -> None:
            if at is At.NODE and reached is phase and stage == 1 and next(passed) == last:
                raise RunError("a fault of this test")

        with monkeypatch.context() as patch:
            patch.setattr("node.telemetry.points.hook", fail)
            with pytest.raises(RunError, match="a fault of this test"):
                stages.outcomes()
        after = stages.state()
        assert all(same(dict(before[unit]), dict(after[unit])) for unit in before)
        # In sync the others may have finished and voted before the fault.
        voted = [executor.voted for executor in stages.executors]
        assert not (all(voted) if phase is Phase.SYNC else any(voted))
        stages.forget()
        stages.train(TRAINED - step)
        assert stages.weights_sha256() == unsplit(CONFIG)[1]


def test_a_gradient_that_is_not_finite_names_its_unit_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoil(at: At, phase: Phase, stage: int, step: int, tensor: object) -> None:
        if at is At.TENSOR and phase is Phase.BACKWARD and isinstance(tensor, Tensor) and stage == 1:
            tensor.fill_(float("nan"))

    with MemoryPipeline(CONFIG, rows=ROWS[2]) as stages:
        stages.train(1)
        with monkeypatch.context() as patch:
            patch.setattr("node.telemetry.points.hook", spoil)
            with pytest.raises(NonFiniteError, match=r"the gradient of .* of block.* in local step 1"):
                stages.outcomes()
        stages.forget()
        stages.train(TRAINED - 1)
        assert stages.weights_sha256() == unsplit(CONFIG)[1]


def test_a_snapshot_after_a_round_has_the_outer_momentum_and_goes_on_to_the_same_bits() -> None:
    with MemoryPipeline(CONFIG, rows=ROWS[2]) as stages:
        stages.train(1)
        exact = {unit: serialize_unit(dict(state)) for unit, state in stages.state().items()}
        stages.train(1)
        files = {unit: serialize_unit(dict(state)) for unit, state in stages.state().items()}
    for saved, has_outer in ((exact, False), (files, True)):
        for unit, data in saved.items():
            state = deserialize_unit(data)
            named = {
                name.removeprefix(PARAMETER_PREFIX) for name in state if name.startswith(PARAMETER_PREFIX)
            }
            outer = {name.removeprefix(OUTER_PREFIX) for name in state if name.startswith(OUTER_PREFIX)}
            assert outer == (named if has_outer else set())
            checked_digest(CONFIG, 100, unit, LayerFile(data, ""))
    for step, saved in ((1, exact), (2, files)):
        with MemoryPipeline(CONFIG, rows=ROWS[1]) as stages:
            stages.restore(step, lambda unit, saved=saved: deserialize_unit(saved[unit]))  # type: ignore[misc]
            stages.train(TRAINED - step)
            assert stages.weights_sha256() == unsplit(CONFIG)[1]


def test_a_node_that_follows_a_round_holds_its_state() -> None:
    kept: list[dict[str, bytes]] = [{}, {}]
    with MemoryPipeline(CONFIG, rows=ROWS[2]) as stages:
        stages.train(1)
        begun = stages.state()
        for stage in range(2):

            def keep(step: int, unit: str, roots: list[Tensor], stage: int = stage) -> None:
                kept[stage][unit] = torch.cat(list(roots)).numpy().tobytes()

            stages.executors[stage].keep_sums = keep
        outcomes = stages.outcomes()
        stages.commit(outcomes)
        reached = stages.state()
    for stage in range(2):
        follower = StageExecutor(CONFIG, CPU, StageClock(), StageModel(CONFIG, CPU))
        follower.place(stage, 2, RowShare(CONFIG, 0, ROWS[1]))
        follower.restore(1, lambda unit: begun[unit])
        assert {unit: follower.sum_bytes(unit) for unit in follower.units} == {
            unit: len(data) for unit, data in kept[stage].items()
        }
        assert follower.put_sums(kept[stage]) == outcomes[stage].norms
        follower.apply(1.0, 1.0)
        held = follower.copy_state()
        assert all(same(held.whole(unit), dict(reached[unit])) for unit in held.units)


def test_a_round_sends_four_bits_an_element_and_little_beside_them() -> None:
    share = RowShare(CONFIG, 0, ROWS[4])
    config = changed(model={"hidden": 256, "ffn": 1024, "heads": 8, "kv_heads": 8})
    units = ("block.0000", "block.0001")
    exact, of_round = (sync_bytes(config, units, share, of_round=one) for one in (False, True))
    pieces = model_pieces(config, of_round=True)
    elements = sum(piece.elements for unit in units for piece in pieces[unit] if not piece.is_vectors)
    coded = sum(piece_bytes(piece) for unit in units for piece in pieces[unit])
    assert 4.25 <= 8 * coded / elements < 4.75
    assert of_round < 0.6 * exact, "and an exact step's default is 8 bits"


def test_what_a_round_keeps_is_freed_when_it_ends() -> None:
    trainer = ReferenceTrainer(CONFIG, corpus(CONFIG))
    local: LocalSteps = trainer._local
    trainer.train(TRAINED)
    assert not local._kept and not local._means
