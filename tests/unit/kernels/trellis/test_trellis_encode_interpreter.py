"""`trellis-R`'s encoder for a GPU gives the CPU's bytes under Triton's interpreter, and never waits.

Its lanes are coded by the CPU's loops here: `test_trellis_interpreter` compares those with Triton's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.common import dispatch
from kernels.common.tiles import NON_FINITE
from kernels.trellis import lanes as trellis_lanes
from kernels.trellis.triton.state import CONTROLS
from tests.support.interpreter import inside
from wire.codecs import trellis
from wire.codecs.base import Codec
from wire.codecs.header import EXPONENT, HEADER_BYTES
from wire.codecs.registry import codec
from wire.errors import PackedMismatchError
from wire.spec import TensorSpec

pytestmark = inside

POISON = 0xA5
NAME = "trellis-4.41"
# Operators that wait for a device, or whose result has a shape that depends on data.
WAITING = (
    "_local_scalar_dense",
    "_to_copy",
    "nonzero",
    "masked_select",
    "masked_scatter",
    "index",
    "unique",
    "repeat_interleave",
    "item",
    "equal",
    "bincount",
)
# Small launches on top of Triton's: buffers of zeros, the payload's zeros.
FILLS = 2
LAUNCHES = 82


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank() -> torch.Tensor:
    """One for which a prediction pays."""
    return normal(33, 3) @ normal(3, 34, seed=1) + 0.02 * normal(33, 34, seed=2)


@pytest.fixture
def cpu_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.trellis.triton.lanes import Lanes

    def encode(
        self: Lanes,
        residual: torch.Tensor,
        classes: torch.Tensor,
        control: torch.Tensor,
        gains: torch.Tensor,
        *,
        salt: int | None = None,
        first_family: int = 0,
        **_: object,
    ) -> None:
        elements = self.where.elements
        for told in control.view(-1, CONTROLS)[: self.at_once].tolist():
            active, family, slot, offset = told
            if not active:
                continue
            coded = trellis_lanes.encode(
                residual[offset : offset + elements],
                classes[:elements],
                float(gains[0]),
                self.where,
                first_family + family,
                salt,
            )
            self.states.view(-1, *coded.states.shape)[slot] = coded.states
            self.counts.view(-1, *coded.counts.shape)[slot] = coded.counts
            self.words.view(-1, *coded.words.shape)[slot] = coded.words

    monkeypatch.setattr(Lanes, "encode", encode)


@pytest.fixture
def large_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that find costs take more of them each, which changes no bit and saves the interpreter most of
    what a small tensor takes it. One test goes by the shares that GPUs are given."""
    from kernels.trellis.triton import plan as triton_trellis_plan

    monkeypatch.setattr(triton_trellis_plan, "_SUMS", 128)
    monkeypatch.setattr(triton_trellis_plan, "_STEPS", 64)


def encoded(x: torch.Tensor, salt: int | None = None) -> tuple[torch.Tensor, int]:
    """The payload, from a poisoned buffer between guards, and the exponent."""
    from kernels.trellis.triton import encode as triton_trellis_encode

    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    size = codec(NAME).encode(torch.zeros_like(x)).numel() - HEADER_BYTES
    whole = torch.full((size + 64,), POISON, dtype=torch.uint8)
    payload = whole[32:-32]
    exponent = triton_trellis_encode.encode(
        x.reshape(rows, columns), payload, trellis.settings(rows, columns, size, salt), salt
    )
    assert (whole[:32] == POISON).all() and (whole[-32:] == POISON).all()
    return payload, int(exponent)


@pytest.mark.usefixtures("cpu_lanes", "large_shares")
@pytest.mark.timeout(300)
def test_payload_is_the_cpus() -> None:
    x = low_rank()
    expected = codec(NAME).encode(x)
    # Something of a prediction is checked: its rank.
    assert expected[HEADER_BYTES + 10] > 0
    check_payload(x, expected)


@pytest.mark.usefixtures("cpu_lanes", "large_shares")
def test_payload_with_dither_is_the_cpus() -> None:
    x, salt = normal(9, 20), 2**32 - 5
    check_payload(x, codec(NAME.replace("trellis", "dither")).salted(salt).encode(x), salt)


@pytest.mark.usefixtures("cpu_lanes", "large_shares")
def test_payload_of_zeros_is_the_cpus() -> None:
    check_payload(torch.zeros(2, 3), codec(NAME).encode(torch.zeros(2, 3)))


@pytest.mark.usefixtures("cpu_lanes")
def test_payload_is_the_cpus_by_the_shares_of_gpus() -> None:
    x = normal(1, 19) * 1e-40
    check_payload(x, codec(NAME).encode(x))


@pytest.mark.usefixtures("large_shares")
@pytest.mark.timeout(300)
def test_rows_together_are_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed bytes between guards, and their decoded values; with Triton's lanes in two calls."""
    from kernels.trellis.triton import encode as triton_trellis_encode

    # Of attempts only the number differs: the last one is best or is not.
    monkeypatch.setattr(trellis, "_MAX_ATTEMPTS", 2)
    columns, which = 11, codec(NAME.replace("trellis", "dither")).salted(77)
    x = normal(4, columns)
    x[1] *= 1e-41
    x[2] = float("nan")
    x[3, 3:] *= 2.0**-30
    alone = [which.pack(row) for row in x]
    # The last row has a scale for each column.
    assert [bool(packed[HEADER_BYTES + 9]) for packed in alone] == [False, False, False, True]
    size = len(alone[0])
    records = torch.full((len(x), -(-size // 128) * 128), POISON, dtype=torch.uint8)
    records[:, HEADER_BYTES:size] = 0
    exponents = triton_trellis_encode.encode_many(
        x,
        trellis.settings(1, columns, size - HEADER_BYTES, 77),
        77,
        payload=records[0, HEADER_BYTES:size],
        record=records.shape[1],
        room=1 << 20,
    )
    assert exponents.tolist() == [int(packed[EXPONENT].view(torch.int32)) for packed in alone]
    assert torch.equal(records[:, HEADER_BYTES:size], torch.stack(alone)[:, HEADER_BYTES:])
    assert (records[:, :HEADER_BYTES] == POISON).all() and (records[:, size:] == POISON).all()
    spec = TensorSpec(x.dtype, (columns,))
    packed = [which.encode(row) for row in (*x[:2], torch.zeros(columns), x[3])]
    expected = torch.stack([which.decode(one, spec) for one in packed])
    check_unpacking(which, spec, packed, expected, monkeypatch)


def check_unpacking(
    which: Codec,
    spec: TensorSpec,
    packed: list[torch.Tensor],
    expected: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows together; by themselves one of zeros, and one that has more than one class."""
    size = len(packed[0])
    headers = [which.open(one.numpy(), spec) for one in packed]
    records = torch.full((len(packed), -(-size // 128) * 128), POISON, dtype=torch.uint8)
    for record, one in zip(records, packed, strict=True):
        record[:size] = one
    alone: list[int] = []
    unpack = which.unpack

    def counted(*given: Any) -> torch.Tensor:
        alone.append(int(given[0].data_ptr() - records.data_ptr()) // records.shape[1])
        return unpack(*given)

    monkeypatch.setattr(which, "unpack", counted)
    monkeypatch.setattr(dispatch, "has_kernels", lambda *_: True)
    values = which.unpack_rows(records, spec, headers, packed)
    assert alone == [2, 3]
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))
    # A word of the second row's: its lanes do not end where they began.
    forged = packed[1].clone()
    forged[HEADER_BYTES + 32 + 4] ^= 1
    records[1, :size] = forged
    with pytest.raises(PackedMismatchError):
        which.unpack_rows(records, spec, headers, [packed[0], forged, *packed[2:]])


def check_payload(x: torch.Tensor, expected: torch.Tensor, salt: int | None = None) -> None:
    payload, exponent = encoded(x, salt)
    assert torch.equal(payload, expected[HEADER_BYTES:])
    assert exponent == int(expected[EXPONENT].view(torch.int32))


@pytest.mark.usefixtures("cpu_lanes", "large_shares")
def test_what_is_not_finite_leaves_zeros() -> None:
    x = normal(2, 5)
    x[1, 3] = float("nan")
    payload, exponent = encoded(x)
    assert exponent == NON_FINITE and not payload.any()


class Counting(TorchDispatchMode):
    """Names of the operators that torch runs; fails for those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITING:
            raise AssertionError(f"{func} may wait for the device")
        self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_neither_waiting_nor_launches_depend_on_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are counted, not run, so that large tensors can be asked about."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: list[str] = []

    def run(self: Any, *_: object, grid: object, warmup: bool, **__: object) -> None:
        launched.append(self.fn.__name__)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    from kernels.trellis.triton import encode as triton_trellis_encode

    for shape in ((1024, 768), (8192, 256)):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        size = 4 * x.numel() // 8
        payload = torch.empty(size, dtype=torch.uint8)
        asked = trellis.settings(*shape, size)
        triton_trellis_encode.encode(x, payload, asked)
        launched.clear()
        with Counting() as seen:
            triton_trellis_encode.encode(x, payload, asked)
        fills = [name for name in seen.names if name in ("zeros", "zero_", "fill_", "copy_")]
        views = {"view", "slice", "select", "detach"}
        others = set(seen.names) - {"zeros", "zero_", "empty", "empty_like"} - views
        assert len(launched) == LAUNCHES and len(fills) == FILLS and not others


def test_waiting_would_be_seen() -> None:
    waits: list[Callable[[torch.Tensor], object]] = [
        lambda x: x[0].item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.to(torch.float64),
    ]
    for wait in waits:
        with pytest.raises(AssertionError, match="may wait"), Counting():
            wait(torch.ones(3))
