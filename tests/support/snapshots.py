"""Snapshots of a small model, as a run writes them."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from node.config.schema import ModelSection, RunConfig
from node.model.chunk import build_chunk
from node.schedule.placement import split_units
from node.state.manifest import Manifest, weights_line
from node.state.serialization import serialize_unit
from node.state.snapshot import SnapshotFolder
from node.state.unit_state import LayerDigest, UnitHash, layout_of
from node.training.optimizer import StageOptimizer

MODEL = ModelSection(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=31, sequence=8)
CONFIG = RunConfig(model=MODEL)


def unit_hash(tensors: Mapping[str, np.ndarray]) -> UnitHash:
    """The hash of a unit's file, without creating the file."""
    digest = LayerDigest(layout_of(tensors))
    for name in digest.order:
        digest.add(name, tensors[name])
    return digest.hash


def unit_weights_sha256(parameters: Mapping[str, np.ndarray]) -> str:
    """The hash of one unit's parameters, given as arrays by name without prefix."""
    digest = sha256()
    for name in sorted(parameters):
        array = np.ascontiguousarray(parameters[name])
        digest.update(weights_line(name, array.dtype, array.shape))
        digest.update(array.data)
    return digest.hexdigest()


def unit_states(seed: int = 0, chunks: int = 1) -> dict[str, dict[str, Tensor]]:
    built = [build_chunk(MODEL, units, seed, torch.device("cpu")) for units in split_units(MODEL, chunks)]
    optimizer = StageOptimizer(built, CONFIG.training)
    return {unit: optimizer.unit_state(unit) for unit in optimizer.units}


def put(writer: SnapshotFolder, step: int, unit: str, tensors: Mapping[str, Tensor]) -> Manifest | None:
    data = serialize_unit(tensors)
    return writer.put(step, unit, data)


def write_snapshot(root: Path, step: int, seed: int = 0) -> Manifest:
    writer = SnapshotFolder(root, CONFIG, "run-1")
    manifest = None
    for unit, tensors in unit_states(seed).items():
        assert manifest is None
        manifest = put(writer, step, unit, tensors)
    assert manifest is not None
    return manifest
