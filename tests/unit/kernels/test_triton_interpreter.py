"""The Triton kernels give the golden bits under Triton's interpreter, on a CPU."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.common import dispatch
from kernels.common.dispatch import Launch
from kernels.fixed import reference as fixed
from kernels.tah import reference as tah
from tests.support.cases import each
from tests.support.interpreter import inside
from wire.codecs import tah as tah_codec
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import FixedFormat
from wire.codecs.header import EXPONENT, seal
from wire.codecs.registry import codec
from wire.errors import CodecError, NonFiniteError
from wire.spec import TensorSpec

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
DIGESTS = json.loads((GOLDEN / "codecs.json").read_text())
TENSORS = load_file(GOLDEN / "codecs.safetensors")
CODECS = ("tah", "fixed-2", "fixed-4", "fixed-8", "fixed-10")
GUARD = 64
POISON = 0xA5
LAUNCHES = (Launch(16, 1), Launch(32, 4))
FIXED = ((4, LAUNCHES[0]), (7, LAUNCHES[1]), (9, LAUNCHES[1]))
"""Widths and launches."""

pytestmark = [
    *inside,
    # Tiles beyond a tensor's end and refused input divide by zero and overflow in numpy, as on a GPU.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_kernels", lambda *_: True)


def poisoned(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes + 2 * GUARD,), POISON, dtype=torch.uint8)


def only_written_inside(whole: torch.Tensor) -> bool:
    return bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all())


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.usefixtures("kernels_on_the_cpu")
@each("name", [name for name in DIGESTS if name.rsplit(".", 1)[1] in CODECS])
def test_bytes_and_values_are_the_golden_ones(name: str) -> None:
    which, x = name.rsplit(".", 1)[1], TENSORS[f"input.{name.rsplit('.', 1)[0]}"]
    packed = codec(which).encode(x)
    assert digest(packed) == DIGESTS[name]["packed"]
    decoded = codec(which).decode(packed, TensorSpec(x.dtype, tuple(x.shape)))
    assert digest(decoded) == DIGESTS[name]["decoded"]


def mixed() -> torch.Tensor:
    """Zeros, constants, ties, outliers, and tiles that are subnormal in fp16 beside the largest."""
    x = torch.randn(2, 9, 256, generator=torch.Generator().manual_seed(1))
    x[0, 0, :64] = 0
    x[0, 1, :64] = 1.5
    x[1, 0] = x[1, 1]
    x[0, 2] *= 1e-3
    x[1, 2] *= 1e-7
    x[0, 3, 64:128] *= 1e-9
    x[1, 4, 70] = 100
    x[1, 5, 255] = -300
    return x


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "mixed": mixed(),
        "mixed bf16": mixed().bfloat16(),
        "ties": torch.randint(-5, 6, (4, 128), generator=generator).float(),
        "all equal": torch.ones(2, 25, 64),
        "rows apart": torch.randn(4, 256, generator=generator)[:, 64:192],
        "40 decades": torch.randn(10, 64, generator=generator) * torch.logspace(-38, 1, 10)[:, None],
        "subnormal bf16": (torch.randn(3, 70, generator=generator) * 1e-38).bfloat16(),
    }


@pytest.mark.usefixtures("kernels_on_the_cpu")
@each(("name", "width"), [("fixed-4", 256), ("fixed-7", 70), ("fixed-8", 128), ("fixed-10", 61)])
def test_rows_together_are_each_by_itself(name: str, width: int) -> None:
    """Odd widths, zeros, subnormal numbers, the largest there are; each row between its neighbours' bytes."""
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(width))
    x[1], x[2], x[3] = 0, x[2] * 1e-42, x[3] * 1e37
    x[4] *= torch.logspace(-30, 10, width)
    x[5, 3] = float("nan")
    which = codec(name)
    alone = [which.pack(row) for row in x]
    size = len(alone[0])
    records = torch.full((len(x), -(-size // 128) * 128), POISON, dtype=torch.uint8)
    exponents = which._pack_rows(x, records, size)
    spec = TensorSpec(x.dtype, (width,))
    records.view(torch.int32)[:, EXPONENT.start // 4] = exponents
    values = which.unpack_rows(records[:5], spec, [which._header(spec)] * 5)
    records[1, 64:66] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(NonFiniteError):
        which.unpack_rows(records[:5], spec, [which._header(spec)] * 5)
    records[1, 64:size] = alone[1][64:]
    records[:, 48:52] = POISON
    assert (records[:, :64] == POISON).all() and (records[:, size:] == POISON).all()
    for number, packed in enumerate(alone):
        assert int(exponents[number]) == int(packed[EXPONENT].view(torch.int32))
        if number != 5:
            assert torch.equal(records[number, 64:size], packed[64:])
            seal(packed.numpy())
            expected = which.decode(packed, TensorSpec(x.dtype, (width,)))
            assert torch.equal(values[number].view(torch.int32), expected.view(torch.int32))


@each(
    ("which", "launch"),
    [
        *((which, LAUNCHES[number % 2]) for number, which in enumerate(inputs())),
        ("mixed", LAUNCHES[1]),
    ],
)
def test_tah_is_the_reference_for_any_launch(which: str, launch: Launch) -> None:
    from kernels.tah.triton import decode as triton_tah_decode
    from kernels.tah.triton import encode as triton_tah

    x = inputs()[which]
    samples, tiles = tah_codec.samples_and_tiles(tuple(x.shape))
    split = {"samples": samples, "four_bit": tah_codec.four_bit_tiles(tiles)}
    layout = tah_codec._layout(tuple(x.shape))
    expected, whole = torch.zeros(layout.nbytes, dtype=torch.uint8), poisoned(layout.nbytes)
    made = whole[GUARD:-GUARD]
    layout.clear_gaps(made)
    sections = tah.TahSections(*layout.views(expected))
    exponent = tah.encode(x, sections, samples=samples, four_bit=split["four_bit"])
    found = torch.full((1,), 77, dtype=torch.int32)
    triton_tah.encode(
        x,
        *layout.views(made),
        found,
        samples=samples,
        four_bit=split["four_bit"],
        measure=launch,
        quantize=launch,
        select=launch,
    )
    assert int(found) == int(exponent) and torch.equal(made, expected) and only_written_inside(whole)
    decoded, room = torch.empty(x.shape, dtype=x.dtype), poisoned(x.nbytes)
    out = room[GUARD:-GUARD].view(x.dtype).view(x.shape)
    tah.decode(sections, decoded, int(exponent))
    status = triton_tah_decode.decode(
        *sections,
        out,
        exponent.view(1),
        samples=samples,
        four_bit=split["four_bit"],
        launch=launch,
    )
    assert not status.any() and digest(out) == digest(decoded) and only_written_inside(room)


@each(
    ("which", "width", "launch"),
    [
        *((which, *FIXED[number % len(FIXED)]) for number, which in enumerate(inputs())),
        *(("mixed", *case) for case in FIXED[1:]),
    ],
)
def test_fixed_is_the_reference_for_any_launch(which: str, width: int, launch: Launch) -> None:
    from kernels.fixed import triton as triton_fixed

    x = inputs()[which]
    layout = FixedCodec(FixedFormat(width))._layout(tuple(x.shape))
    expected, whole = torch.zeros(layout.nbytes, dtype=torch.uint8), poisoned(layout.nbytes)
    made = whole[GUARD:-GUARD]
    layout.clear_gaps(made)
    sections = fixed.FixedSections(*layout.views(expected))
    exponent = fixed.encode(x, sections)
    found = torch.full((1,), 77, dtype=torch.int32)
    triton_fixed.encode(x, *layout.views(made), found, launch=launch, finish=launch)
    assert int(found) == int(exponent) and torch.equal(made, expected) and only_written_inside(whole)
    decoded, room = torch.empty(x.shape, dtype=x.dtype), poisoned(x.nbytes)
    out = room[GUARD:-GUARD].view(x.dtype).view(x.shape)
    fixed.decode(sections, decoded, int(exponent))
    status = triton_fixed.decode(*sections, out, exponent.view(1), launch=launch)
    assert not status.any() and digest(out) == digest(decoded) and only_written_inside(room)


@pytest.mark.usefixtures("kernels_on_the_cpu")
@pytest.mark.parametrize("name", ["tah", "fixed-8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_refused(name: str, bad: float) -> None:
    x = mixed()[:, 3:4]
    x[1, 0, 200] = bad
    packed = codec(name).pack(x)
    with pytest.raises(NonFiniteError):
        seal(packed.numpy())


@pytest.mark.usefixtures("kernels_on_the_cpu")
@pytest.mark.parametrize(("name", "offset"), [("tah", 13), ("fixed-8", 13), ("fixed-8", -1)])
def test_bits_that_hold_nothing_are_refused_before_kernels_see_them(name: str, offset: int) -> None:
    """Behind the scales of 6 tiles, and in the last, which is short."""
    x = inputs()["subnormal bf16"]
    packed = codec(name).encode(x)
    packed[64:][offset] = 0x80
    seal(packed.numpy())
    with pytest.raises(CodecError, match="in its padding"):
        codec(name).decode(packed, TensorSpec(x.dtype, tuple(x.shape)))


@each(
    ("name", "section", "value"),
    [
        ("tah", 0, b"\x00\x7e"),
        ("tah", 0, b"\x00\x80"),
        ("tah", 1, b"\x00\xfc"),
        ("tah", 2, b"\x00"),
        ("tah", 2, b"\xff\xff\xff"),
        ("fixed-8", 0, b"\x01\x7c"),
        ("fixed-8", 0, b"\x00\xfc"),
        ("fixed-8", 0, b"\x00\x00"),
        ("fixed-8", 1, b"\xff" * 8 * 72 * 8),
    ],
)
def test_impossible_payloads_are_refused_as_by_the_reference(
    name: str, section: int, value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = mixed()
    which, spec = codec(name), TensorSpec(x.dtype, tuple(x.shape))
    packed = which.encode(x)
    header = which.open(packed.numpy(), spec)
    layout = (
        tah_codec._layout(spec.shape) if name == "tah" else FixedCodec(FixedFormat(8))._layout(spec.shape)
    )
    target = layout.views(packed[64:])[section].view(torch.uint8).view(-1)
    target[: len(value)] = torch.tensor(list(value), dtype=torch.uint8)
    said = []
    for kernels in (False, True):
        monkeypatch.setattr(dispatch, "has_kernels", lambda *_, kernels=kernels: kernels)
        with pytest.raises(CodecError) as problem:
            which.unpack(packed, spec, header)
        said.append((problem.type, str(problem.value)))
    assert said[0] == said[1]
