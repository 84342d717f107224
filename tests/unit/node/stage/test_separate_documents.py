"""`data.separate_documents`: a sample of several documents has the losses of these documents alone."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.reach import Documents
from node.config.schema import (
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    StorageSection,
    TrainingSection,
)
from node.data.data import document_starts
from node.model.chunk import Chunk, build_chunk, compute_precision
from node.model.labels import BatchPart, bytes_of, from_bytes, to_bytes
from node.model.storage import PRESETS, Storage
from node.model.units import unit_names
from node.schedule.placement import split_units
from node.stage.passes import AutogradPasses, ChunkCall
from tests.support.memory_pipeline import MemoryPipeline, corpus, reference_run
from tests.support.reference_trainer import ReferenceTrainer

CPU = torch.device("cpu")
LLAMA = ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=48, init_std=0.3)
MODELS = {
    "llama": LLAMA,
    "window": replace(LLAMA, window=5, no_window=(1,)),
    "gpt2": replace(LLAMA, family="gpt2", kv_heads=4),
    "qwen3": replace(LLAMA, qk_norm="head"),
}
STORAGES = {"off": Storage(), "again": Storage(again=True), "agoq": PRESETS["agoq"]}
CASES = [(name, way) for name, model in MODELS.items() for way in STORAGES]
CUTS = (0, 7, 8, 30, 48)


def packed() -> tuple[Tensor, Tensor]:
    """Tokens [1, 49] of four documents, and where they begin [1, 48]."""
    tokens = torch.randint(256, (1, 49), generator=torch.Generator().manual_seed(5))
    starts = torch.zeros(1, 48, dtype=torch.bool)
    starts[0, list(CUTS[:-1])] = True
    return tokens, starts


def built(model: ModelSection, storage: Storage | None = None) -> Chunk:
    return build_chunk(model, unit_names(model), 3, CPU, storage=storage)


@pytest.mark.parametrize(("name", "storage"), CASES, ids=str)
def test_packed_documents_compute_as_each_alone(name: str, storage: str) -> None:
    """Logits and the gradient of every parameter, in float32; packed activations to their own rounding."""
    model = MODELS[name]
    tokens, starts = packed()
    alone, together = built(model), built(model, STORAGES[storage])
    losses = []
    for first, last in pairwise(CUTS):
        logits = alone(tokens[:, first:last])
        losses.append(F.cross_entropy(logits[0], tokens[0, first + 1 : last + 1], reduction="sum"))
    (torch.stack(losses).sum() / 48).backward()
    loss = together.loss(tokens[:, :-1], tokens[:, 1:], Documents.of(starts, CPU))
    loss.backward()  # type: ignore[no-untyped-call]
    crossing = built(model).loss(tokens[:, :-1], tokens[:, 1:])
    exact = torch.stack(losses).sum() / 48
    # With its attention in bf16, and gradients from 4 bits.
    of_loss, allowed = (3e-4, 0.3) if storage == "agoq" else (1e-5, 1e-4)
    assert abs(loss - exact) <= of_loss * exact < 0.2 * abs(crossing - exact)
    for (name, one), other in zip(together.named_parameters(), alone.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).norm() <= allowed * other.grad.norm(), name


def test_stored_blocks_in_bf16_see_the_same_documents() -> None:
    """Rounding differs, but no more than without documents; crossing them is far off."""
    tokens, starts = packed()
    documents = Documents.of(starts, CPU)
    found = {}
    for name, storage in (("plain", None), ("agoq", PRESETS["agoq"]), ("compact", PRESETS["compact"])):
        with compute_precision("bfloat16", CPU):
            found[name] = float(built(LLAMA, storage).loss(tokens[:, :-1], tokens[:, 1:], documents).detach())
    exact = float(built(LLAMA).loss(tokens[:, :-1], tokens[:, 1:], documents).detach())
    crossing = float(built(LLAMA).loss(tokens[:, :-1], tokens[:, 1:]).detach())
    assert abs(crossing - exact) > 0.05
    assert all(abs(loss - exact) < 0.02 for loss in found.values()), found


@pytest.mark.parametrize("preset", ["off", "agoq"])
@pytest.mark.parametrize("model", [LLAMA, MODELS["gpt2"]], ids=["llama", "gpt2"])
def test_a_split_run_has_the_bits_of_the_reference(model: ModelSection, preset: str) -> None:
    config = RunConfig(
        model=replace(model, layers=3),
        training=TrainingSection(global_batch=4, microbatch=2, warmup_steps=0),
        data=DataSection(separate_documents=True),
        storage=StorageSection(preset=preset),
        pipeline=PipelineSection(stages=3, window=0, forward_codec="fp32", backward_codec="fp32"),
    )
    expected = reference_run(config, 3, split_units(config.model, 3))
    with MemoryPipeline(config) as stages:
        steps = stages.train(3)
        assert (steps, stages.weights_sha256()) == expected
    across = replace(config, data=DataSection())
    assert reference_run(across, 1, split_units(config.model, 3))[0][0].loss != steps[0].loss


def test_held_out_samples_are_measured_within_their_documents() -> None:
    config = RunConfig(model=LLAMA, data=DataSection(separate_documents=True))
    data = corpus(config)
    trainer = ReferenceTrainer(config, data)
    tokens, starts = packed()
    from node.data.samples import Samples

    windows = tokens.numpy()
    found = trainer.validation_loss(Samples(windows, windows[:, 1:], starts.numpy()))
    with torch.no_grad():
        exact = trainer.chunks[0].loss(tokens[:, :-1], tokens[:, 1:], Documents.of(starts, CPU))
    assert found == float(exact)
    assert trainer.validation_loss(windows) != found


def test_more_documents_than_usual_change_no_bit_of_a_pass() -> None:
    """The list of documents is longer then; a CPU computes with where each begins."""
    tokens, starts = packed()
    usual, many = Documents.of(starts, CPU), Documents.of(torch.ones_like(starts), CPU)
    assert not many.like(usual)
    chunk = built(LLAMA)
    passes = AutogradPasses(ChunkCall(chunk), "float32", CPU, 1)
    loss = passes.forward(0, tokens[:, :-1], tokens[:, 1:], many)
    logits = torch.stack([chunk(tokens[:, at : at + 1])[0, 0] for at in range(48)])
    torch.testing.assert_close(loss, F.cross_entropy(logits, tokens[0, 1:]).detach())


def test_starts_travel_as_a_bit_a_token() -> None:
    starts = document_starts(np.array([[5, 0, 7, 7, 0, 1, 2, 3, 0, 4], [0] * 10]), 0)
    assert starts[0].tolist() == [True, False, True, False, False, True, False, False, False, True]
    assert starts[1].all()
    data = to_bytes(BatchPart.DOCUMENTS, starts)
    assert len(data) == bytes_of(BatchPart.DOCUMENTS, 2, 10) == 4
    assert np.array_equal(from_bytes(BatchPart.DOCUMENTS, data, 2, 10), starts)
