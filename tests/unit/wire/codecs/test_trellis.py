"""`trellis-R`: its budget, its error, its limits, and what it makes of forged bytes."""

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import each
from tests.support.examples import examples
from wire.codecs.formats import TrellisFormat
from wire.codecs.header import seal
from wire.codecs.registry import codec
from wire.codecs.trellis import TrellisCodec
from wire.errors import CodecError, PackedMismatchError
from wire.spec import TensorSpec

ROOT = Path(__file__).resolve().parents[4]
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(GOLDEN))

import trellis_write  # noqa: E402 - a script beside the vectors, in no package

DIGESTS = json.loads((GOLDEN / "trellis.json").read_text())
INPUTS = trellis_write.inputs()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec_of(x: torch.Tensor) -> TensorSpec:
    return TensorSpec(x.dtype, tuple(x.shape))


def round_trip(which: TrellisCodec, x: torch.Tensor) -> torch.Tensor:
    packed = which.encode(x)
    assert packed.shape == (which.packed_bytes(spec_of(x)),)
    decoded = which.decode(packed, spec_of(x))
    assert decoded.dtype == x.dtype and decoded.shape == x.shape and decoded.isfinite().all()
    return decoded


def relative_error(which: TrellisCodec, x: torch.Tensor) -> float:
    x64 = x.double()
    return ((round_trip(which, x).double() - x64).norm() / x64.norm()).item()


# ---- rates


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("trellis-4.41", "trellis-4.41"), ("trellis-2.0", "trellis-2"), ("trellis-10", "trellis-10")],
)
def test_any_rate_from_2_to_10_is_a_codec(name: str, canonical: str) -> None:
    assert codec(name).name == canonical
    assert codec(name) is codec(name)


@settings(max_examples=examples(300))
@given(thousandths=st.integers(2000, 10000), elements=st.integers(1, 2**34))
def test_bytes_never_exceed_the_rate_of_tensors_that_are_not_small(thousandths: int, elements: int) -> None:
    which = TrellisCodec(TrellisFormat(thousandths / 1000))
    size = which.packed_bytes(TensorSpec(torch.float32, (-(-elements // 4096), min(elements, 4096))))
    count = -(-elements // 4096) * min(elements, 4096)
    budget = thousandths * count / 8000
    # Small ones: the header and as much again for the fixed parts.
    assert size <= (budget if count >= 4608 else budget + 128)
    assert size > budget - 129


def test_one_element_more_never_takes_fewer_bytes() -> None:
    which = TrellisCodec(TrellisFormat(3.45))
    sizes = [which.packed_bytes(TensorSpec(torch.float32, (n,))) for n in range(1, 9000)]
    assert sizes == sorted(sizes)


# ---- error


def test_noise_that_nothing_predicts_comes_near_the_rate_distortion_bound() -> None:
    x = normal(1, 512, 512)
    for rate in (3.0, 4.41, 6.5):
        # 2**-R is the bound; a uniform quantizer, ideally coded, takes 1.19 times that.
        assert relative_error(TrellisCodec(TrellisFormat(rate)), x) <= 1.13 * 2**-rate


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_bits_less_error(dtype: torch.dtype) -> None:
    x = normal(4, 64, 96).to(dtype)
    errors = [
        relative_error(TrellisCodec(TrellisFormat(rate)), x) for rate in (2.0, 2.5, 3.0, 4.0, 5.5, 7.0, 8.5)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.35 and errors[-1] < 0.006


def test_a_tensor_of_low_rank_is_almost_free() -> None:
    x = normal(1, 256, 4) @ normal(4, 256, seed=1) + 0.01 * normal(256, 256, seed=2)
    # A hundredth of what quantizing without prediction could do, and half of it is what is not of low rank.
    assert relative_error(TrellisCodec(TrellisFormat(4.41)), x) < 0.006


def test_massive_outlier_channels_do_not_blind_the_others() -> None:
    x = normal(1, 256, 512)
    rest = torch.ones(512, dtype=torch.bool)
    rest[[17, 300]] = False
    x[..., 17] = 3000 + 20 * x[..., 17]
    x[..., 300] *= 800
    decoded = round_trip(TrellisCodec(TrellisFormat(4.41)), x)
    others = (decoded - x)[..., rest].norm() / x[..., rest].norm()
    assert others < 0.08


def test_single_spikes_are_escaped_not_spread() -> None:
    x = normal(1, 128, 256)
    x[0, 5, 9], x[0, 70, 200] = 900.0, -2500.0
    decoded = round_trip(TrellisCodec(TrellisFormat(4.41)), x)
    assert (decoded - x).abs().max() < 1
    assert ((decoded - x)[0, 100:].norm() / x[0, 100:].norm()) < 0.08


def test_silent_rows_cost_their_neighbours_nothing() -> None:
    x = normal(1, 256, 256)
    dense = relative_error(TrellisCodec(TrellisFormat(4.41)), x)
    x[0, ::2] = 0
    assert relative_error(TrellisCodec(TrellisFormat(4.41)), x) < dense / 4


@each("rate", [2.0, 4.41, 10.0])
@each("scale", [1e-44, 1e-38, 1e-30, 1e30, 3e37])
def test_size_of_the_numbers_does_not_matter(rate: float, scale: float) -> None:
    x = normal(3, 40, 70) * scale
    plain = relative_error(TrellisCodec(TrellisFormat(rate)), normal(3, 40, 70))
    # Below fp32's normal range the result has fewer digits.
    assert relative_error(TrellisCodec(TrellisFormat(rate)), x) <= plain * 1.06 + (
        0.5 if scale == 1e-44 else 1e-6
    )


@each("value", [1.0, -7.25, 1e-30, 3e38, 65504.0])
@each("shape", [(1,), (3,), (1, 100), (100, 1), (2, 64, 96)])
def test_equal_elements(value: float, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, value)
    assert relative_error(TrellisCodec(TrellisFormat(4.41)), x) < 0.05


def test_zeros_are_zeros() -> None:
    for x in (torch.zeros(2, 30, 40), -torch.zeros(5), torch.zeros(1, 1, 1, dtype=torch.bfloat16)):
        assert (round_trip(TrellisCodec(TrellisFormat(2.0)), x) == 0).all()


kinds = st.sampled_from(("normal", "sparse", "cubed", "steep rows", "spikes", "integers", "wide"))


def made(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    x = normal(*shape, seed=seed)
    match kind:
        case "sparse":
            return torch.where(normal(*shape, seed=seed + 1) > 1.5, x, 0.0)
        case "cubed":
            return x**5
        case "steep rows":
            return x * torch.logspace(-12, 6, shape[0]).view(-1, *(1,) * (x.dim() - 1))
        case "spikes":
            return torch.where(normal(*shape, seed=seed + 1) > 2.5, x * 1e5, x)
        case "integers":
            return x.round()
        case "wide":
            return torch.exp2(12 * x)
    return x


@settings(max_examples=examples(120))
@given(
    kind=kinds,
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
    thousandths=st.integers(2000, 10000),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_any_tensor_at_any_rate_fits(
    kind: str, shape: tuple[int, ...], thousandths: int, seed: int, dtype: torch.dtype
) -> None:
    x = made(kind, shape, seed).to(dtype)
    decoded = round_trip(TrellisCodec(TrellisFormat(thousandths / 1000)), x)
    # Nothing is worse than sending zeros would be.
    assert (decoded.double() - x.double()).norm() <= x.double().norm() * 1.001


# ---- sameness


def test_every_golden_vector_has_its_input() -> None:
    assert {name.rsplit(" ", 1)[0] for name in DIGESTS} == set(INPUTS)


@pytest.mark.parametrize("name", DIGESTS)
def test_bytes_and_values_are_the_golden_ones(name: str) -> None:
    key, which = name.rsplit(" ", 1)
    assert trellis_write.digests(key, which, INPUTS[key]) == DIGESTS[name]


# ---- forged bytes

# With a prediction; with low bits and escapes; without either.
FORGEABLE = {
    "predicted": ("trellis-10", INPUTS["low-rank"][0, :32, :40].contiguous()),
    "long": ("trellis-8.125", INPUTS["outliers"][0, :16, :32].contiguous()),
    "peaked": ("trellis-4.41", INPUTS["peaked"][:8]),
}


@cache
def intact(name: str) -> torch.Tensor:
    """What the codec makes of a tensor of `FORGEABLE`; tests change copies of it."""
    which, x = FORGEABLE[name]
    return codec(which).encode(x)


@settings(max_examples=examples(600))
@given(
    name=st.sampled_from(tuple(FORGEABLE)),
    changes=st.lists(
        st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 2**20)), st.integers(1, 255)),
        min_size=1,
        max_size=4,
    ),
)
@pytest.mark.timeout(240)
def test_forged_payloads_give_a_finite_tensor_or_a_refusal(name: str, changes: list[tuple[int, int]]) -> None:
    which, x = FORGEABLE[name]
    forged = intact(name).clone()
    for offset, change in changes:
        forged[64 + offset % (forged.numel() - 64)] ^= change
    seal(forged.numpy())
    try:
        decoded = codec(which).decode(forged, spec_of(x))
    except CodecError as error:
        assert "\n" not in str(error)
        return
    assert decoded.isfinite().all()


@settings(max_examples=examples(300))
@given(name=st.sampled_from(tuple(FORGEABLE)), seed=st.integers(0, 2**32 - 1), keep=st.integers(0, 400))
def test_payloads_of_noise_are_refused(name: str, seed: int, keep: int) -> None:
    which, x = FORGEABLE[name]
    forged = intact(name).clone()
    noise = np.random.default_rng(seed).integers(0, 256, forged.numel() - 64 - keep, dtype=np.uint8)
    forged[64 + keep :] = torch.from_numpy(noise)
    seal(forged.numpy())
    with pytest.raises(PackedMismatchError, match="trellis"):
        codec(which).decode(forged, spec_of(x))


@each(
    ("offset", "value", "what"),
    [
        (0, 2, "prefix"),
        (0, 0, "a payload of zeros"),
        (1, 2, "prefix"),
        (3, 0x60, "step"),
        (5, 0x7F, "class"),
        (7, 0x7F, "class"),
        (8, 7, "classes too far apart"),
        (9, 255, "classes too far apart"),
        (10, 65, "prediction"),
        (11, 2, "prediction"),
        (11, 7, "prediction"),
        (12, 6, "prediction"),
        (13, 99, "prediction"),
        (15, 0x7F, "prediction"),
        (16, 0, "wrong length|bytes after|bits after"),
        (19, 0x7F, "wrong length"),
        (20, 1, "prefix"),
        (28, 1, "prefix"),
    ],
)
def test_a_wrong_field_is_refused(offset: int, value: int, what: str) -> None:
    which, x = FORGEABLE["predicted"]
    forged = intact("predicted").clone()
    assert forged[64 + offset] != value
    forged[64 + offset] = value
    seal(forged.numpy())
    with pytest.raises(PackedMismatchError, match=what):
        codec(which).decode(forged, spec_of(x))


def test_rates_do_not_read_each_other() -> None:
    x = INPUTS["row"]
    with pytest.raises(PackedMismatchError):
        codec("trellis-4.411").decode(codec("trellis-4.41").encode(x), spec_of(x))
