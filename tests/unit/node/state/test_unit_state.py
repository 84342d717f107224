"""A unit's snapshot file: what the optimizer saves is accepted, what no node can load is refused."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load, save
from torch import Tensor

from node.config.schema import (
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SnapshotsSection,
    TrainingSection,
)
from node.model.chunk import build_chunk, weight_dtype
from node.model.optimizers import unit_layout
from node.model.units import unit_names
from node.schedule.placement import split_units
from node.state.manifest import LayerFile
from node.state.serialization import CACHE_PREFIX, deserialize_unit, serialize_unit
from node.state.snapshot import SnapshotFolder
from node.state.unit_state import (
    PARAMETER_PREFIX,
    LayerDigest,
    checked_digest,
    has_weights_alone,
    read_tensors,
    weights_file,
)
from node.training.optimizer import StageOptimizer
from tests.support.snapshots import unit_hash
from wire.codecs.sample_cache import SampleCache
from wire.errors import ProtocolViolationError, RunError

MODEL = ModelSection(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=31, sequence=8)
PLAIN = RunConfig(model=MODEL)
PACKED = RunConfig(model=MODEL, training=TrainingSection(moments="fp8"))
REMEMBERS = RunConfig(model=MODEL, pipeline=PipelineSection(forward_codec="aqsgd-4"))
BLOCK = "block.0000"
WINDOWS = 5

Arrays = dict[str, np.ndarray]


def check(
    config: RunConfig, windows: int, unit: str, state: Mapping[str, Tensor], *, weights_alone: bool = False
) -> None:
    """Check the file of a unit's state."""
    file = LayerFile(serialize_unit(state), "")
    checked_digest(config, windows, unit, file, weights_alone=weights_alone)


def states(config: RunConfig) -> dict[str, dict[str, Tensor]]:
    """Every unit's after a step."""
    model = config.model
    (units,) = split_units(model, 1)
    chunk = build_chunk(model, units, 0, torch.device("cpu"), weight_dtype(config.training.weights))
    optimizer = StageOptimizer([chunk], config.training)
    with torch.autocast("cpu", torch.bfloat16, enabled=config.training.weights == "bfloat16"):
        chunk(torch.arange(8).view(1, 8)).float().square().mean().backward()
    optimizer.apply(1e-3, 1.0)
    return {unit: optimizer.unit_state(unit) for unit in optimizer.units}


def cache(config: RunConfig) -> dict[str, Tensor]:
    """What a boundary remembers after a step."""
    shape = (config.model.sequence, config.model.hidden)
    remembered = SampleCache(WINDOWS, shape, since=0)
    remembered.stage(0, (1, 4), torch.randn(2, *shape).bfloat16())
    remembered.commit()
    return {f"{CACHE_PREFIX}{name}": tensor for name, tensor in remembered.state().items()}


@pytest.mark.parametrize(
    ("moments", "weights"), [("float32", "float32"), ("fp8", "float32"), ("fp8", "bfloat16")]
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_optimizer_state_matches_the_unit_layout(family: str, moments: str, weights: str) -> None:
    model = replace(MODEL, family=family, kv_heads=2 if family == "gpt2" else 1)
    config = RunConfig(model=model, training=TrainingSection(moments=moments, weights=weights))
    saved = states(config)
    assert tuple(saved) == unit_names(model)
    for unit, state in saved.items():
        tensors = read_tensors(serialize_unit(state))
        found = {name: (array.dtype.name, array.shape) for name, array in tensors.items()}
        assert found == unit_layout(config, unit)
        check(config, WINDOWS, unit, state)


@pytest.mark.parametrize("moments", ["fp32", "fp8"])
def test_a_states_hash_is_that_of_its_file_which_is_not_made(moments: str) -> None:
    shapes = {"parameter.w": (3, 5), "exp_avg_sq.w": (3, 5), 'parameter."é': (0, 2), "parameter.b": ()}
    state = {name: torch.rand(shape) for name, shape in shapes.items()}
    state |= {"step": torch.tensor(3), "activation_cache.values": torch.ones(2, 1, dtype=torch.int16)}
    if moments == "fp8":
        state["exp_avg_sq.w"] = torch.ones(15, dtype=torch.uint8)
    state["parameter.turned"] = torch.rand(4, 3).t()
    data, arrays = serialize_unit(state), {name: one.numpy() for name, one in state.items()}
    found = unit_hash(arrays)
    assert found.sha256 == sha256(data).hexdigest()
    for kind, sum_of_squares in (("parameter", found.weights), ("exp_avg_sq", found.squares)):
        tensors = [one for name, one in state.items() if name.startswith(kind) and one.dtype == torch.float32]
        assert sum_of_squares == pytest.approx(sum(float(one.double().square().sum()) for one in tensors))


def test_files_are_those_of_safetensors() -> None:
    """So another program reads them, and a layer has the hash that it had when safetensors wrote it."""
    dtypes = (torch.bool, torch.uint8, torch.int16, torch.float16, torch.float32, torch.float64, torch.int64)
    state = {f"{str(dtype)[6:]}.{n}": torch.ones(n, 3).to(dtype) for dtype in dtypes for n in (2, 1)}
    assert serialize_unit(state) == safetensors.torch.save(state)


def test_the_last_snapshot_may_have_weights_alone() -> None:
    config = replace(PLAIN, run=RunSection(steps=4), snapshots=SnapshotsSection(last="weights"))
    assert has_weights_alone(config, 4) and not has_weights_alone(config, 3)
    assert not has_weights_alone(replace(config, snapshots=SnapshotsSection()), 4)
    tensors = states(config)[BLOCK]
    weights = {name: one for name, one in tensors.items() if name.startswith(PARAMETER_PREFIX)}
    check(config, WINDOWS, BLOCK, weights, weights_alone=True)
    for wrong, alone in ((tensors, True), (weights, False)):
        with pytest.raises(RunError):
            check(config, WINDOWS, BLOCK, wrong, weights_alone=alone)


def test_a_boundarys_sample_cache_is_used_where_the_codec_has_one() -> None:
    state = states(REMEMBERS)[BLOCK]
    check(REMEMBERS, WINDOWS, BLOCK, state)
    remembering = {**state, **cache(REMEMBERS)}
    check(REMEMBERS, WINDOWS, BLOCK, remembering)
    empty = {f"{CACHE_PREFIX}{name}": tensor for name, tensor in SampleCache(5, (8, 16), 0).state().items()}
    check(REMEMBERS, WINDOWS, BLOCK, {**state, **empty})
    with pytest.raises(RunError, match=r"activation_cache.samples is unknown"):
        check(PLAIN, WINDOWS, BLOCK, remembering)
    with pytest.raises(RunError, match="samples has values"):
        check(REMEMBERS, 4, BLOCK, remembering)


def without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def retyped(name: str, dtype: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {**tensors, name: tensors[name].astype(dtype)}


def reshaped(name: str, *shape: int) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {**tensors, name: tensors[name].reshape(shape)}


def spoilt(name: str, number: float) -> Callable[[Arrays], Arrays]:
    """With one element, in the middle, replaced."""

    def spoil(tensors: Arrays) -> Arrays:
        array = tensors[name].copy()
        array.reshape(-1)[array.size // 2] = number
        return {**tensors, name: array}

    return spoil


UP, UP_MEAN, UP_SQUARE = "parameter.up.weight", "exp_avg.up.weight", "exp_avg_sq.up.weight"
VALUES, SAMPLES, SINCE = (f"{CACHE_PREFIX}{part}" for part in ("values", "samples", "since"))
INFINITE, NEGATIVE_NAN = np.array([0x7F80, 0xFFC0], np.uint16).view(np.int16).tolist()


@pytest.mark.parametrize(
    ("config", "change", "line"),
    [
        (PLAIN, without("step"), "step is missing"),
        (PLAIN, without(UP), "up.weight is missing"),
        (PLAIN, without(UP_SQUARE), "exp_avg_sq.up.weight is missing"),
        (PLAIN, lambda tensors: {**tensors, "other": np.zeros(1)}, "other is unknown"),
        (PLAIN, retyped(UP, "float16"), "is float16 .*, not float32"),
        (PLAIN, retyped(UP, "float64"), "is float64"),
        (PLAIN, retyped("step", "int32"), "step is int32"),
        (PLAIN, reshaped(UP_MEAN, 16, 24), r"is float32 \[16, 24\], not float32 \[24, 16\]"),
        (PLAIN, reshaped("step", 1), r"step is int64 \[1\]"),
        (PLAIN, spoilt("step", -1), "step has values"),
        *((PLAIN, spoilt(UP, number), "has values that no step") for number in (np.nan, np.inf, -np.inf)),
        (PLAIN, spoilt(UP_MEAN, np.nan), "has values"),
        (PLAIN, spoilt(UP_SQUARE, np.inf), "has values"),
        (PLAIN, spoilt(UP_SQUARE, -1.0), "has values"),
        (PACKED, retyped(UP_MEAN, "float32"), "is float32 .*, not uint8"),
        (PACKED, spoilt(UP_MEAN, 0x7F), "has values"),
        (PACKED, spoilt(UP_MEAN, 0xFF), "has values"),
        (PACKED, spoilt(UP_SQUARE, 0x80), "has values"),
        (PACKED, spoilt("exp_avg_power.up.weight", 0), "has values"),
        (PACKED, spoilt("exp_avg_scale.up.weight", -1.0), "has values"),
        (PACKED, spoilt("exp_avg_sq_scale.up.weight", np.nan), "has values"),
        (REMEMBERS, without(SINCE), "since is missing"),
        (REMEMBERS, without(SAMPLES), "samples is missing"),
        (REMEMBERS, retyped(VALUES, "float32"), "is float32 .*, not int16"),
        (REMEMBERS, reshaped(VALUES, 2, 16, 8), r"is int16 \[2, 16, 8\]"),
        (REMEMBERS, spoilt(VALUES, INFINITE), "has values"),
        (REMEMBERS, spoilt(VALUES, NEGATIVE_NAN), "has values"),
        (REMEMBERS, spoilt(SAMPLES, 1), "has values"),
        (REMEMBERS, spoilt(SAMPLES, WINDOWS), "has values"),
        (REMEMBERS, spoilt(SINCE, -1), "has values"),
    ],
)
def test_an_unusable_state_is_not_stored(
    tmp_path: Path, config: RunConfig, change: Callable[[Arrays], Arrays], line: str
) -> None:
    state = states(config)[BLOCK]
    if config.pipeline.remembers:
        state |= cache(config)
    writer = SnapshotFolder(tmp_path, config, "run-1", WINDOWS)
    good = serialize_unit(state)
    bad = save(change(load(good)))
    with pytest.raises(ProtocolViolationError, match=rf"{BLOCK} does not fit this model \(.*{line}"):
        writer.put(1, BLOCK, bad)
    assert list(tmp_path.iterdir()) == []
    assert writer.put(1, BLOCK, good) is None
    assert writer.missing(1) == ("embed", "head")


def test_a_checkpoints_weights_travel_in_bfloat16_where_that_holds_them() -> None:
    halves = torch.randn(3, 5).to(torch.bfloat16)
    halves[0, 0], halves[0, 1] = -0.0, torch.finfo(torch.bfloat16).max
    weights = {"a": halves.float().numpy(), "b": np.float32([1.0, 1.0 + 2**-8, 0.0]), "c": np.float32([2.0])}
    found = deserialize_unit(weights_file(weights))
    dtypes = {name: tensor.dtype for name, tensor in found.items()}
    assert dtypes == {
        "parameter.a": torch.bfloat16,
        "parameter.b": torch.float32,
        "parameter.c": torch.bfloat16,
    }
    for name, array in weights.items():
        assert found[f"parameter.{name}"].float().numpy().tobytes() == array.tobytes()
    bits = {**weights, "a": halves.view(torch.uint16).numpy()}
    assert weights_file(bits) == weights_file(weights)


def test_a_files_tensors_are_read_in_place_and_as_safetensors_reads_them() -> None:
    state = {"parameter.w": torch.rand(3, 5), "parameter.b": torch.rand(())}
    state |= {"parameter.none": torch.ones(0, 2), "exp_avg.w": torch.ones(15, dtype=torch.uint8)}
    state["step"] = torch.tensor(3)
    data = serialize_unit(state)
    found, expected = read_tensors(data), load(data)
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    assert np.shares_memory(found["parameter.w"], np.frombuffer(data, np.uint8))


def test_other_files_are_read_as_safetensors_reads_them_or_refused() -> None:
    data = serialize_unit({"a.w": torch.rand(2, 3), "step": torch.tensor(3)})
    start = 8 + int.from_bytes(data[:8], "little")
    odd = b'\x00 "-1[,}\xff'
    changed = [data[:at] + bytes([byte]) + data[at + 1 :] for at in range(start) for byte in odd]
    header = data[8:start].rstrip()
    for text in (b'{"a":1,' + header[1:], header.replace(b"[2,3]", b"[true,6]"), b"[" * 90000, b"[]", b"1"):
        changed.append(len(text).to_bytes(8, "little") + text + data[start:])
    for other in (*changed, data[:-1], data + b"x", data[:7], b""):
        try:
            expected = load(other)
        except Exception:  # whatever safetensors raises
            with pytest.raises(RunError):
                read_tensors(other)
        else:
            found = read_tensors(other)
            assert sorted(found) == sorted(expected)
            assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


@pytest.mark.parametrize("size", [0, 5, 256, 1000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-12, 1e-22, 1e25], ids=str)
def test_sums_of_squares_are_exact_where_squares_are_no_float32_numbers(size: int, scale: float) -> None:
    array = (np.random.default_rng(1).standard_normal(size) * scale).astype(np.float32)
    digest = LayerDigest({"parameter.w": ("float32", array.shape)})
    digest.add("parameter.w", array)
    assert digest.hash.weights == pytest.approx(float((array.astype(np.float64) ** 2).sum()), rel=1e-6, abs=0)
