"""What `aqsgd-b` sends and remembers is what was checked in (tests/golden/aqsgd_write.py wrote it)."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from wire.codecs.header import seal
from wire.errors import CodecError, PackedMismatchError
from wire.spec import TensorSpec

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
sys.path.insert(0, str(GOLDEN))

import aqsgd_write  # noqa: E402 - a script beside the vectors, in no package

TENSORS = load_file(GOLDEN / "aqsgd.safetensors")
DIGESTS = json.loads((GOLDEN / "aqsgd.json").read_text())
RUNS = [(f"aqsgd-{bits}", dtype) for bits in aqsgd_write.BITS for dtype in aqsgd_write.DTYPES]


def known(dtype: str) -> list[tuple[torch.Tensor, TensorSpec, tuple[int, ...]]]:
    """The packed bytes of every pass, as checked in, what they hold, and the samples."""
    xs = aqsgd_write.inputs(aqsgd_write.DTYPES[dtype])
    packed = [TENSORS[f"{dtype}.{number}"] for number in range(1, len(xs) + 1)]
    specs = [TensorSpec(x.dtype, tuple(x.shape)) for x in xs]
    return list(zip(packed, specs, aqsgd_write.PASSES, strict=True))


def test_every_width_and_dtype_has_golden_vectors() -> None:
    passes = range(1, len(aqsgd_write.PASSES) + 1)
    assert set(DIGESTS) == {f"{name} {dtype} pass {number}" for name, dtype in RUNS for number in passes}


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_both_ends_send_and_remember_the_golden_ones(name: str, dtype: str) -> None:
    made = list(aqsgd_write.passes(name, aqsgd_write.DTYPES[dtype]))
    for number, (packed, digests) in enumerate(made, start=1):
        assert digests == DIGESTS[f"{name} {dtype} pass {number}"]
        assert digests["sender remembers"] == digests["receiver remembers"]
        if name == aqsgd_write.WHOLE:
            assert torch.equal(packed, TENSORS[f"{dtype}.{number}"])


@pytest.mark.parametrize("dtype", aqsgd_write.DTYPES)
def test_a_receiver_makes_the_golden_tensors_of_the_golden_bytes(dtype: str) -> None:
    """Without a sender of today's."""
    receiver = aqsgd_write.End(aqsgd_write.WHOLE)
    for number, (packed, spec, samples) in enumerate(known(dtype), start=1):
        wanted = DIGESTS[f"{aqsgd_write.WHOLE} {dtype} pass {number}"]
        assert aqsgd_write.digest(receiver.decode(packed, spec, samples)) == wanted["decoded"]
        receiver.cache.commit()
        assert aqsgd_write.digest(receiver.remembered()) == wanted["receiver remembers"]


@pytest.mark.parametrize("number", range(1, len(aqsgd_write.PASSES) + 1))
def test_a_changed_byte_fails(number: int) -> None:
    """Refused as it is; with its checksum made anew it is refused, too, or other values are decoded and kept,
    but for changes so small that bf16 rounds them away."""
    before, at_hand = known("fp32")[: number - 1], known("fp32")[number - 1]
    packed, spec, samples = at_hand
    wanted = DIGESTS[f"{aqsgd_write.WHOLE} fp32 pass {number}"]
    receiver = aqsgd_write.End(aqsgd_write.WHOLE)
    for earlier in before:
        receiver.decode(*earlier)
        receiver.cache.commit()
    held = receiver.cache.state()
    generator = torch.Generator().manual_seed(number)
    told = 0
    for _ in range(30):
        forged = packed.clone()
        forged[int(torch.randint(packed.numel(), (), generator=generator))] ^= int(
            torch.randint(1, 256, (), generator=generator)
        )
        with pytest.raises(PackedMismatchError):
            receiver.decode(forged, spec, samples)
        receiver.cache.rollback()
        try:
            seal(forged.numpy())
            decoded = receiver.decode(forged, spec, samples)
        except CodecError:
            told += 1
            continue
        receiver.cache.commit()
        same = aqsgd_write.digest(decoded) == wanted["decoded"]
        assert same == (aqsgd_write.digest(receiver.remembered()) == wanted["receiver remembers"])
        told += not same
        receiver = aqsgd_write.End(aqsgd_write.WHOLE)
        receiver.cache.load(held)
    assert told >= 28, told
