"""A stage's model as it is built, again and again."""

import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection, RunConfig, TrainingSection
from node.model import chunk
from node.stage import stage_model, state_copy
from node.stage.stage_model import StageModel
from node.stage.state_copy import StateCopy, hash_layer, read_layer
from node.state.serialization import serialize_unit
from node.state.snapshot_cache import SnapshotCache
from node.state.unit_state import parameters_of
from node.training.optimizer import StateTensor
from tests.support.snapshots import unit_weights_sha256
from wire.errors import RunError

CONFIG = RunConfig(
    model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=1, microbatch=1),
)


@pytest.mark.parametrize("gradients", ["float32", "fp8"])
def test_a_rollback_never_holds_two_of_a_stage(gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there is gone before its successor is made, without waiting for a collection of cycles."""
    config = replace(CONFIG, training=replace(CONFIG.training, gradients=gradients))
    model = StageModel(config, torch.device("cpu"))
    model.build(0, 1)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model.begin_step()
    model.forward(0, 0, tokens, tokens)
    model.backward(0, 0, None)
    model.finish_step()
    model.squared_norms()
    model.apply(1e-3, 1.0)
    weights = [weakref.ref(parameter) for parameter in model.optimizer.parameters]
    assert weights and all(weight() is not None for weight in weights)
    build: Callable[..., Any] = stage_model.build_chunk
    built: list[str] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        assert not [weight for weight in weights if weight() is not None]
        built.append("chunk")
        return build(*arguments, **options)

    monkeypatch.setattr(stage_model, "build_chunk", watched)
    model.build(0, 1)
    assert built == ["chunk"]


@pytest.mark.parametrize("compute", ["float32", "fp8"])
def test_weights_that_are_loaded_are_not_drawn_before(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = "float32" if compute == "float32" else "bfloat16"
    config = replace(CONFIG, training=replace(CONFIG.training, compute=compute, precision=precision))
    drawn, loaded = StageModel(config, torch.device("cpu")), StageModel(config, torch.device("cpu"))
    drawn.build(0, 1)
    monkeypatch.setattr(chunk, "initial_weight", lambda *_: pytest.fail("a weight was drawn"))
    loaded.build(0, 1, is_drawn=False)
    for unit in drawn.optimizer.units:
        loaded.load_unit_state(unit, drawn.unit_state(unit))
    tokens = torch.arange(16).reshape(1, 16)
    for model in (drawn, loaded):
        model.begin_step()
        model.forward(0, 0, tokens, tokens)
        model.backward(0, 0, None)
        model.finish_step()
    assert drawn.squared_norms() == loaded.squared_norms()


# ---- a state that is read while steps go on is that of its step, whoever is slow


SECONDS = 20.0
SAVED = {torch.bfloat16: torch.float32}


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copy, "SLICE", 7)
    monkeypatch.setattr(state_copy, "AT_ONCE_BYTES", 0)


def unit(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "step": torch.tensor(seed),
        "parameter.weight": torch.randn((5, 6), generator=random).bfloat16(),
        "parameter.none": torch.ones(0, 3),
        "exp_avg.weight": torch.randn((5, 6), generator=random),
        "exp_avg_sq.weight": torch.arange(30, dtype=torch.uint8),
    }


def as_saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.to(SAVED.get(one.dtype, one.dtype)).clone() for name, one in tensors.items()}


def copy_of(units: Mapping[str, Mapping[str, Tensor]], **given: bool) -> StateCopy:
    return StateCopy(
        (
            (
                name,
                {key: StateTensor(one, SAVED.get(one.dtype, one.dtype)) for key, one in tensors.items()},
            )
            for name, tensors in units.items()
        ),
        **given,
    )


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_layer_that_is_read_is_the_file_of_its_state(stays: bool, on_disk: bool, tmp_path: Path) -> None:
    tensors = unit()
    data = serialize_unit(as_saved(tensors))
    state = copy_of({"embed": tensors}, stays=stays)
    cache = SnapshotCache(tmp_path, 10**6)
    if on_disk:
        with cache.writing(3, "embed", len(data)) as file:
            found = read_layer(state, "embed", file, 0)
        kept = cache.get(3, "embed")
        assert kept is not None and kept.data == data
    else:
        found = read_layer(state, "embed", None, 0)
    assert found.file.read(0, found.file.size) == data and found.file.read(4, 9) == data[4:13]
    found.file.close()
    assert found.hash == hash_layer(copy_of({"embed": tensors}), "embed")
    assert found.file.sha256 == found.hash.sha256 == sha256(data).hexdigest()
    arrays = {name: one.numpy() for name, one in as_saved(tensors).items()}
    assert found.weights_sha256 == unit_weights_sha256(parameters_of(arrays))


def test_a_change_waits_for_who_reads_and_copies_what_nobody_has_read() -> None:
    """`embed` is being read, slowly; `head` is not read before its time is over."""
    units = {"embed": unit(1), "head": unit(2)}
    expected = {name: as_saved(tensors) for name, tensors in units.items()}
    state, begun, go_on = copy_of(units), threading.Event(), threading.Event()
    read: dict[str, list[np.ndarray]] = {}

    def take(name: str, array: np.ndarray) -> None:
        begun.set()
        assert go_on.wait(SECONDS)
        read.setdefault(name, []).append(array.copy())

    def changes() -> None:
        state.settle(0.0)
        for tensors in units.values():
            for one in tensors.values():
                one.zero_()

    with ThreadPoolExecutor() as pool:
        reader = pool.submit(state.read, "embed", expected["embed"], take)
        assert begun.wait(SECONDS)
        change = pool.submit(changes)
        assert not change.done(), "a slice is in use"
        go_on.set()
        reader.result(SECONDS)
        change.result(SECONDS)
    for name, pieces in read.items():
        assert np.array_equal(np.concatenate(pieces), expected["embed"][name].reshape(-1).numpy())
    assert not any(one.any() for one in units["head"].values())
    found = read_layer(state, "head", None, None)
    assert found.file.read(0, found.file.size) == serialize_unit(expected["head"])


@pytest.mark.parametrize("ends", [StateCopy.close, lambda state: state.done("embed")])
def test_nothing_waits_for_what_is_read_or_is_read_no_more(ends: Callable[[StateCopy], None]) -> None:
    state = copy_of({"embed": unit()})
    ends(state)
    state.settle(SECONDS)


def test_a_state_that_is_closed_is_not_read() -> None:
    state = copy_of({"embed": unit()})
    state.close()
    with pytest.raises(RunError):
        hash_layer(state, "embed")


def test_impossible_numbers_are_found_as_they_are_read() -> None:
    tensors = unit() | {"parameter.bad": torch.tensor([1.0] * 20 + [torch.inf])}
    with pytest.raises(RunError, match=r"parameter\.bad"):
        read_layer(copy_of({"embed": tensors}), "embed", None, 0)
    read_layer(copy_of({"embed": tensors}), "embed", None, None)


def test_a_unit_whose_file_fails_after_it_was_read_is_not_read_again() -> None:
    """It may have changed by then."""
    state = copy_of({"embed": unit(), "head": unit(1)})
    assert not state.is_done("embed")
    hash_layer(state, "embed")
    assert state.is_done("embed") and not state.is_done("head")
    state.settle(0.0)
    assert not state.is_done("head"), "it was copied"
