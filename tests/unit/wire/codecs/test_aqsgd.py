"""`aqsgd-b`: two ends that never exchange more than packed bytes stay equal, and what they must not do."""

import pytest
import torch

from tests.support.cases import each
from tests.support.fake_streams import FakeStreams
from wire.codecs.aqsgd import AqsgdCodec, SampleBatch
from wire.codecs.formats import AqsgdFormat
from wire.codecs.header import HEADER_BYTES, seal
from wire.codecs.host_copies import HostCopies
from wire.codecs.registry import codec
from wire.codecs.sample_cache import SampleCache
from wire.errors import (
    CacheMismatchError,
    CodecError,
    ConfigError,
    NonFiniteError,
    PackedMismatchError,
    RunError,
)
from wire.spec import TensorSpec

SHAPES = [(5, 70), (3, 64), (1, 1), (2, 7, 33)]
BIGGEST = torch.finfo(torch.float32).max


def activations(shape: tuple[int, ...], seed: int, samples: int) -> torch.Tensor:
    return torch.randn((samples, *shape), generator=torch.Generator().manual_seed(seed))


def spec(x: torch.Tensor) -> TensorSpec:
    return TensorSpec(x.dtype, tuple(x.shape))


class Boundary:
    """A sender and a receiver with a cache each."""

    def __init__(self, bits: int, shape: tuple[int, ...], samples: int = 6, since: int = 0) -> None:
        found = codec(f"aqsgd-{bits}")
        assert isinstance(found, AqsgdCodec)
        self.codec = found
        self.ends = [SampleCache(samples, shape, since) for _ in range(2)]

    def batch(self, end: int, samples: tuple[int, ...], place: int = 0) -> SampleBatch:
        cache = self.ends[end]
        return SampleBatch(cache, samples, tuple(map(cache.knows, samples)), place)

    def send(
        self, x: torch.Tensor, samples: tuple[int, ...], place: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(packed, decoded)"""
        packed = self.codec.of(self.batch(0, samples, place)).encode(x)
        receiver = self.codec.of(self.batch(1, samples, place))
        assert receiver.packed_bytes(spec(x)) == packed.numel()
        return packed, receiver.decode(packed, spec(x))

    def commit(self) -> None:
        for end in self.ends:
            end.commit()

    def assert_equal(self, samples: list[int]) -> None:
        left, right = (end.recall(samples, torch.device("cpu")) for end in self.ends)
        assert torch.equal(left.view(torch.int16), right.view(torch.int16))


@each("bits", range(2, 9))
@each("shape", SHAPES)
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_first_pass_is_bf16_then_changes_by_the_definition(
    bits: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    boundary = Boundary(bits, shape)
    first = activations(shape, 1, 3).to(dtype)
    packed, decoded = boundary.send(first, (4, 0, 2))
    remembered = first.to(torch.bfloat16)
    assert torch.equal(decoded, remembered.to(dtype))
    elements = first.numel()
    assert packed.numel() == HEADER_BYTES + -(-2 * elements // 16) * 16
    assert packed.numel() == boundary.codec.format.first_pass_bytes(tuple(first.shape))
    boundary.commit()

    fixed = codec(f"fixed-{bits}")
    for seed in (2, 3):
        # In another order than before, as another pass has it.
        x = (first.float() + 0.1 * activations(shape, seed, 3)).to(dtype)[[2, 0, 1]]
        packed, decoded = boundary.send(x, (2, 4, 0))
        before = remembered[[2, 0, 1]].float()
        change = x.float() - before
        renewed = (before + fixed.decode(fixed.encode(change), spec(change))).to(torch.bfloat16)
        assert torch.equal(decoded, renewed.to(dtype))
        assert packed.numel() == fixed.packed_bytes(spec(change)) == boundary.codec.packed_bytes(spec(x))
        boundary.commit()
        boundary.assert_equal([0, 2, 4])
        remembered = renewed[[1, 2, 0]]


def test_a_tensor_of_new_and_known_samples() -> None:
    boundary = Boundary(4, (5, 70))
    boundary.send(activations((5, 70), 1, 2), (1, 3))
    boundary.commit()
    x = activations((5, 70), 2, 4)
    packed, decoded = boundary.send(x, (0, 1, 2, 3))
    assert torch.equal(decoded[[0, 2]], x[[0, 2]].to(torch.bfloat16).float())
    assert 0 < (decoded[[1, 3]] - x[[1, 3]]).norm() / x[[1, 3]].norm() < 0.3
    assert packed.numel() == HEADER_BYTES + 2 * 350 * 2 + 8 + (2 * 5 * 2 * (2 + 4 * 8) + 8)
    boundary.commit()
    boundary.assert_equal([0, 1, 2, 3])


def test_the_remainder_is_padded() -> None:
    """Sent again and again, an activation that stands still arrives as exactly as bf16 allows."""
    boundary = Boundary(2, (8, 64))
    boundary.send(activations((8, 64), 1, 1), (0,))
    boundary.commit()
    x = activations((8, 64), 2, 1)
    errors = []
    for _ in range(12):
        _, decoded = boundary.send(x, (0,))
        boundary.commit()
        errors.append(((decoded - x).norm() / x.norm()).item())
    assert errors[0] > 0.3 and errors[-1] < 0.004
    stateless = codec("fixed-2")
    assert (stateless.decode(stateless.encode(x), spec(x)) - x).norm() / x.norm() > 0.5


class LoggedCopies(HostCopies):
    """As on a GPU, but for the page-locked memory that there is none of here."""

    def __init__(self) -> None:
        self.streams = FakeStreams()
        super().__init__(self.streams, page_locked=False)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.streams.log.append(f"room for {list(shape)} {dtype}")
        return super().room(shape, dtype)


def test_only_the_commit_waits_for_the_gpu() -> None:
    """What is remembered travels both ways through memory of its own; the bits are a CPU's."""
    boundary, other = Boundary(4, (3, 64)), Boundary(4, (3, 64))
    copies = [LoggedCopies(), LoggedCopies()]
    boundary.ends = [SampleCache(6, (3, 64), since=0, copies=one) for one in copies]
    room = "room for [2, 3, 64] torch.bfloat16"
    for step in range(3):
        for place, samples in enumerate([(0, 1), (4, 2)]):
            x = activations((3, 64), 2 * step + place, 2)
            packed, decoded = boundary.send(x, samples, place)
            for got, wanted in zip((packed, decoded), other.send(x, samples, place), strict=True):
                assert torch.equal(got, wanted)
        boundary.commit()
        other.commit()
        boundary.assert_equal([0, 1, 2, 4])
        one_tensor = [room, "mark on compute"] if step == 0 else [room, room, "mark on compute"]
        recalled = "room for [4, 3, 64] torch.bfloat16"
        for one in copies:
            assert one.streams.log == [*one_tensor, *one_tensor, *["thread waits for compute"] * 2, recalled]
            one.streams.log.clear()
    boundary.send(activations((3, 64), 9, 2), (0, 1))
    for end in boundary.ends:
        end.rollback()
    boundary.commit()
    assert all("thread waits for compute" not in one.streams.log for one in copies)
    boundary.assert_equal([0, 1, 2, 4])


def test_a_gpus_cache_can_change_once_it_is_staged() -> None:
    """Its memory is used again by what the stream does next; the copy was made before."""
    cache = SampleCache(2, (4,), since=0, copies=LoggedCopies())
    learnt = torch.ones(1, 4, dtype=torch.bfloat16)
    cache.stage(0, (1,), learnt)
    learnt.zero_()
    cache.commit()
    assert cache.recall([1], torch.device("cpu")).tolist() == [[1.0] * 4]


def test_an_aborted_step_updates_no_estimate() -> None:
    boundary, other = Boundary(4, (3, 64)), Boundary(4, (3, 64))
    x, y, z = (activations((3, 64), seed, 2) for seed in (1, 2, 3))
    for ends in (boundary, other):
        ends.send(x, (0, 1))
        ends.commit()
    boundary.send(z, (0, 1))
    for end in boundary.ends:
        end.rollback()
    boundary.commit()
    assert torch.equal(boundary.ends[0].recall([0, 1], torch.device("cpu")), x.to(torch.bfloat16))
    again, _ = boundary.send(y, (0, 1))
    undisturbed, _ = other.send(y, (0, 1))
    assert torch.equal(again, undisturbed)
    # A step's tensors are packed against what it began with, whatever it has sent already.
    later, _ = boundary.send(y, (0, 1), place=1)
    assert torch.equal(later, again)


def test_the_later_of_two_sends_of_a_sample_counts() -> None:
    boundary = Boundary(8, (3, 64))
    x, y = activations((3, 64), 1, 1), activations((3, 64), 2, 1)
    boundary.send(y, (5,), place=1)
    boundary.send(x, (5,), place=0)
    boundary.commit()
    assert torch.equal(boundary.ends[1].recall([5], torch.device("cpu")), y.to(torch.bfloat16))


def test_ends_that_remember_differently_refuse() -> None:
    boundary = Boundary(4, (3, 64))
    x = activations((3, 64), 1, 2)
    boundary.send(x, (0, 1))
    boundary.commit()
    packed, _ = boundary.send(x, (0, 1))
    # One bit of what the receiver remembers has changed.
    state = boundary.ends[1].state()
    state["values"][1, 2, 3] ^= 1
    boundary.ends[1] = SampleCache(6, (3, 64), since=0)
    boundary.ends[1].load(state)
    with pytest.raises(CacheMismatchError, match="different sample caches"):
        boundary.codec.of(boundary.batch(1, (0, 1))).decode(packed, spec(x))
    # It began at another step.
    state = boundary.ends[0].state()
    state["since"] += 7
    boundary.ends[1] = SampleCache(6, (3, 64), since=0)
    boundary.ends[1].load(state)
    with pytest.raises(CacheMismatchError, match="this stage's since step 7"):
        boundary.codec.of(boundary.batch(1, (0, 1))).decode(packed, spec(x))
    # It thinks that the samples are new: another size, known before anything is read.
    empty = SampleCache(6, (3, 64), since=0)
    new = boundary.codec.of(SampleBatch(empty, (0, 1), (False, False), 0))
    assert new.packed_bytes(spec(x)) != packed.numel()
    with pytest.raises(PackedMismatchError, match="bytes, not the"):
        new.decode(packed, spec(x))
    # It thinks that they are known, and has lost them.
    with pytest.raises(CacheMismatchError, match="sample 0 is not in"):
        boundary.codec.of(SampleBatch(empty, (0, 1), (True, True), 0)).decode(packed, spec(x))


def test_a_state_read_back_goes_on_with_the_same_bytes() -> None:
    boundary = Boundary(3, (2, 7, 33), since=9)
    x = activations((2, 7, 33), 1, 3)
    boundary.send(x, (5, 0, 3))
    boundary.commit()
    restored = SampleCache(6, (2, 7, 33), since=100)
    restored.load(boundary.ends[1].state())
    assert restored.since == 9 and not restored.knows(1)
    packed, decoded = boundary.send(x + 0.1, (0, 3, 5))
    batch = SampleBatch(restored, (0, 3, 5), (True, True, True), 0)
    assert torch.equal(boundary.codec.of(batch).decode(packed, spec(x)), decoded)


def broken_states() -> list[dict[str, torch.Tensor]]:
    good = {
        "values": torch.zeros(2, 3, 64, dtype=torch.int16),
        "samples": torch.tensor([1, 4]),
        "since": torch.tensor(0),
    }
    infinite = torch.full((2, 3, 64), torch.inf, dtype=torch.bfloat16).view(torch.int16)
    return [
        {},
        {name: tensor for name, tensor in good.items() if name != "since"},
        {**good, "more": torch.zeros(1)},
        {**good, "samples": torch.tensor([1, 6])},
        {**good, "samples": torch.tensor([-1, 4])},
        {**good, "samples": torch.tensor([4, 1])},
        {**good, "samples": torch.tensor([4, 4])},
        {**good, "samples": torch.tensor([4])},
        {**good, "samples": torch.tensor([[1, 4]])},
        {**good, "samples": torch.tensor([1, 4], dtype=torch.int32)},
        {**good, "values": good["values"].float()},
        {**good, "values": good["values"][:, :2]},
        {**good, "values": infinite},
        {**good, "since": torch.zeros(1, dtype=torch.int64)},
    ]


@pytest.mark.parametrize("state", broken_states())
def test_a_state_that_does_not_fit_is_refused(state: dict[str, torch.Tensor]) -> None:
    cache = SampleCache(6, (3, 64), since=0)
    with pytest.raises(RunError, match=r"sample cache .*use an older snapshot"):
        cache.load(state)
    assert not any(map(cache.knows, range(6)))


@each("bad", [torch.inf, -torch.inf, torch.nan, BIGGEST])
@each("known", [False, True])
def test_non_finite_values_are_refused(bad: float, known: bool) -> None:
    boundary = Boundary(4, (3, 64))
    x = activations((3, 64), 1, 2)
    if known:
        boundary.send(torch.full_like(x, -1e38), (0, 1))
        boundary.commit()
    x[1, 2, 5] = bad
    # fp32's largest number is beyond bf16's, and its distance from -1e38 beyond fp32's.
    with pytest.raises(NonFiniteError, match="was not packed"):
        boundary.send(x, (0, 1))


def test_forged_infinities_are_refused() -> None:
    boundary = Boundary(4, (3, 64))
    x = activations((3, 64), 1, 2)
    packed = boundary.codec.of(boundary.batch(0, (0, 1))).encode(x)
    packed[64:66] = torch.tensor([0x80, 0x7F], dtype=torch.uint8)
    seal(packed.numpy())
    with pytest.raises(NonFiniteError, match="holds infinities"):
        boundary.codec.of(boundary.batch(1, (0, 1))).decode(packed, spec(x))


def test_bits_that_hold_nothing_are_refused() -> None:
    """Behind the first passes, and in the short tiles of the changes."""
    boundary = Boundary(4, (1, 35))
    boundary.send(activations((1, 35), 1, 1), (0,))
    boundary.commit()
    x = activations((1, 35), 2, 2)
    packed = boundary.codec.of(boundary.batch(0, (0, 3))).encode(x)
    boundary.codec.of(boundary.batch(1, (0, 3))).decode(packed, spec(x))
    for offset in (2 * 35, packed.numel() - HEADER_BYTES - 1):
        forged = packed.clone()
        forged[HEADER_BYTES + offset] = 0x80
        seal(forged.numpy())
        with pytest.raises(PackedMismatchError, match="bits set in its padding"):
            boundary.codec.of(boundary.batch(1, (0, 3))).decode(forged, spec(x))


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-5, 1e30, 1e38])
def test_values_of_any_size(size: float) -> None:
    boundary = Boundary(6, (4, 64))
    x = activations((4, 64), 1, 1).clamp(-3, 3) * size
    for step in range(3):
        _, decoded = boundary.send(x, (0,))
        boundary.commit()
        assert (decoded.double() - x.double()).norm() / x.double().norm() < (0.004 if step == 0 else 0.003)


def test_the_name_alone_packs_nothing_and_takes_no_gradients() -> None:
    x = activations((3, 64), 1, 2)
    with pytest.raises(CodecError, match=r"pack with `of\(batch\)`"):
        codec("aqsgd-4").encode(x)
    with pytest.raises(CodecError, match="does not hold 1 samples"):
        Boundary(4, (3, 64)).send(x, (0,))
    for name in ("aqsgd-1", "aqsgd-9", "aqsgd-", "aqsgd-4.5"):
        with pytest.raises(ConfigError, match="aqsgd-2 to aqsgd-8"):
            codec(name)
    with pytest.raises(ConfigError, match="aqsgd-9 is not a codec"):
        AqsgdCodec(AqsgdFormat(9))
