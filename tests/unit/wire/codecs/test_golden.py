"""The packed bytes of today are those that were checked in (tests/golden/codecs_write.py wrote them)."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.cases import each
from wire.codecs.registry import codec, codec_names
from wire.spec import TensorSpec

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
TENSORS = load_file(GOLDEN / "codecs.safetensors")
DIGESTS = json.loads((GOLDEN / "codecs.json").read_text())


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def test_every_codec_has_golden_vectors() -> None:
    assert {name.rsplit(".", 1)[1] for name in DIGESTS} == set(codec_names())


@each("name", DIGESTS)
def test_bytes_and_values_are_the_golden_ones(name: str) -> None:
    which, x = name.rsplit(".", 1)[1], TENSORS[f"input.{name.rsplit('.', 1)[0]}"]
    packed = codec(which).encode(x)
    whole = TENSORS.get(f"packed.{name}")
    if whole is not None:
        assert torch.equal(packed, whole)
    assert digest(packed) == DIGESTS[name]["packed"]
    decoded = codec(which).decode(packed, TensorSpec(x.dtype, tuple(x.shape)))
    assert digest(decoded) == DIGESTS[name]["decoded"]
