"""Packing and unpacking beside compute: the codec's bits, in order, with named errors and no leftovers."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.config.schema import PipelineSection, RunConfig
from node.stage import executor
from node.stage import tensor_transfer as module
from node.stage.device_transfer import CpuTransfer, CudaTransfer, DeviceTransfer
from node.stage.stage_model import StageModel
from node.stage.tensor_transfer import BadTensorError, Incoming, TensorTransfer
from node.telemetry.clock import StageClock, TimeKind
from node.tuning.memory_plan import Room
from tests.support.fake_streams import FakeStreams
from wire.codecs.base import Codec
from wire.codecs.host_copies import Mark
from wire.codecs.registry import codec
from wire.errors import CacheMismatchError, NonFiniteError, PackedMismatchError
from wire.spec import Direction, TensorKey, TensorSpec

CPU = torch.device("cpu")
SPEC = TensorSpec(torch.float32, (2, 5, 130))
SECONDS = 10.0


def key(microbatch: int) -> TensorKey:
    return TensorKey(1, 2, microbatch, 0, Direction.ACTIVATION)


def tensor(seed: int) -> Tensor:
    return torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(seed))


class Box:
    """`LinksIO` in memory. `gate` holds packed tensors back from the neighbour."""

    def __init__(self) -> None:
        self.sent: dict[TensorKey, Tensor] = {}
        self.arrived: dict[TensorKey, Tensor] = {}
        self.released: list[TensorKey] = []
        self.watched: dict[TensorKey, Callable[[Tensor], None]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.interrupted: list[Exception] = []

    def interrupt(self, error: Exception) -> None:
        self.interrupted.append(error)

    def holds(self, key: TensorKey) -> bool:
        return key in self.arrived

    def wait_any(self, keys: Sequence[TensorKey]) -> None:
        assert any(map(self.holds, keys))

    def take(self, key: TensorKey) -> Tensor:
        return self.arrived.pop(key)

    def watch(self, key: TensorKey, call: Callable[[Tensor], None]) -> None:
        if key in self.arrived:
            call(self.arrived[key])
        else:
            self.watched[key] = call

    def put(self, key: TensorKey, packed: Tensor) -> None:
        self.arrived[key] = packed
        if (call := self.watched.pop(key, None)) is not None:
            call(packed)

    def release(self, key: TensorKey) -> None:
        self.released.append(key)

    def send(self, key: TensorKey, packed: Tensor, elements: int) -> None:
        assert self.gate.wait(SECONDS)
        assert elements == SPEC.elements
        self.sent[key] = packed


def devices() -> list[DeviceTransfer]:
    return [CpuTransfer(), CudaTransfer(torch.device("cpu"), FakeStreams(), page_locked=False)]


def transfer(device: DeviceTransfer | None = None) -> TensorTransfer:
    return TensorTransfer(device or CpuTransfer(), lambda kind, key: nullcontext())


@pytest.mark.parametrize("device", devices(), ids=lambda device: type(device).__name__)
@pytest.mark.parametrize("name", ["fp32", "bf16", "tah", "fixed-8", "fixed-3"])
def test_the_bits_are_the_codecs_own(device: DeviceTransfer, name: str) -> None:
    there, box = transfer(device), Box()
    for microbatch in range(3):
        there.send(key(microbatch), codec(name), tensor(microbatch), there.computed(), box)
    there.drain()
    for microbatch in range(3):
        packed = codec(name).encode(tensor(microbatch))
        assert torch.equal(box.sent[key(microbatch)], packed)
        box.arrived[key(microbatch)] = packed.clone()
    there.look_ahead([Incoming(key(2), SPEC)], lambda _: codec(name), box)
    assert there.begun(key(2)) and not there.begun(key(0))
    for microbatch in (0, 2, 1):
        there.begin(Incoming(key(microbatch), SPEC), codec(name), box)
        expected = codec(name).decode(codec(name).encode(tensor(microbatch)), SPEC)
        assert torch.equal(there.finish(key(microbatch)), expected)
    assert box.released == [key(2), key(0), key(1)]


class Recorder(CpuTransfer):
    """Notes what is packed and unpacked; refuses one codec."""

    def __init__(self, refused: str = "") -> None:
        super().__init__()
        self.packed: list[tuple[str, TensorSpec]] = []
        self.unpacked: list[tuple[str, TensorSpec]] = []
        self._refused = refused

    def pack(self, codec: Codec, tensor: Tensor, mark: Mark | None) -> Tensor:
        if codec.name == self._refused:
            raise RuntimeError("no compiler")
        self.packed.append((codec.name, TensorSpec(tensor.dtype, tuple(tensor.shape))))
        return super().pack(codec, tensor, mark)

    def unpack(self, codec: Codec, packed: Tensor, spec: TensorSpec) -> tuple[Tensor, None]:
        self.unpacked.append((codec.name, spec))
        return super().unpack(codec, packed, spec)


def test_a_rehearsal_packs_and_unpacks_and_only_logs_what_fails(caplog: pytest.LogCaptureFixture) -> None:
    device, box = Recorder(refused="fixed-8"), Box()
    there = transfer(device)
    there.compile_codecs([codec("tah"), codec("fixed-8"), codec("fixed-4")], tensor(0))
    there.send(key(0), codec("tah"), tensor(1), there.computed(), box)
    there.drain()
    assert device.packed == [("tah", SPEC), ("fixed-4", SPEC), ("tah", SPEC)]
    assert device.unpacked == [("tah", SPEC), ("fixed-4", SPEC)]
    assert list(box.sent) == [key(0)]
    assert [record.getMessage() for record in caplog.records] == [
        "compiling codec fixed-8 failed: no compiler"
    ]


@pytest.mark.parametrize(
    ("forward", "tried"), [("tah", ["tah", "fixed-6"]), ("fixed-6", ["fixed-6"]), ("aqsgd-4", ["fixed-6"])]
)
def test_a_stage_compiles_its_codecs(forward: str, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    device = Recorder()
    monkeypatch.setattr(executor, "device_transfer", lambda _: device)
    config = replace(
        RunConfig(),
        pipeline=replace(PipelineSection(), forward_codec=forward, backward_codec="fixed-6"),
    )
    stage = executor.StageExecutor(config, CPU, StageClock(), StageModel(config, CPU), room=Room(windows=4))
    stage.compile_codecs()
    stage._transfer._thread.shutdown(wait=True)
    boundary = TensorSpec(torch.float32, (2, 256, 256))
    assert device.packed == device.unpacked == [(name, boundary) for name in tried]


def test_the_gpu_waits_and_the_compute_thread_does_not() -> None:
    streams = FakeStreams()
    there = transfer(CudaTransfer(torch.device("cpu"), streams, page_locked=False))
    box = Box()
    there.send(key(0), codec("fixed-8"), tensor(0), there.computed(), box)
    there.drain()
    assert streams.log == [
        "mark on compute",
        "on packing",
        "packing waits for compute",
        "mark on packing",
        "thread waits for packing",
    ]
    streams.log.clear()
    box.arrived[key(0)] = box.sent[key(0)]
    there.begin(Incoming(key(0), SPEC), codec("fixed-8"), box)
    there.finish(key(0))
    assert streams.log == ["on unpacking", "mark on unpacking", "compute waits for unpacking"]


def test_sending_does_not_wait_for_the_network_nor_looking_ahead_for_arrival() -> None:
    there, box = transfer(), Box()
    box.gate.clear()
    there.send(key(0), codec("bf16"), tensor(0), None, box)
    there.look_ahead([Incoming(key(1), SPEC)], lambda _: codec("bf16"), box)
    assert not there.begun(key(1)) and box.sent == {}
    box.gate.set()
    there.drain()
    assert list(box.sent) == [key(0)]


def test_non_finite_values_are_named_before_the_step_ends() -> None:
    there, box = transfer(), Box()
    spoiled = tensor(0)
    spoiled[1, 2, 3] = torch.inf
    there.send(key(7), codec("tah"), spoiled, None, box)
    with pytest.raises(
        NonFiniteError, match=r"to be sent over boundary \d, microbatch 7 \(a tensor of shape"
    ) as raised:
        there.drain()
    assert box.sent == {}
    # Whoever waits for what depends on it must not wait for ever.
    assert box.interrupted == [raised.value]
    there.settle()
    there.send(key(8), codec("tah"), tensor(1), None, box)
    there.drain()
    assert list(box.sent) == [key(8)]


def test_damage_is_found_whoever_asked_and_releases_nothing() -> None:
    there, box = transfer(), Box()
    packed = codec("fixed-8").encode(tensor(0))
    packed[-1] ^= 1
    box.arrived[key(0)] = packed
    there.look_ahead([Incoming(key(0), SPEC)], lambda _: codec("fixed-8"), box)
    there.begin(Incoming(key(0), SPEC), codec("fixed-8"), box)
    with pytest.raises(BadTensorError, match=r"the activation received .*, microbatch 0 \(.*checksum") as bad:
        there.finish(key(0))
    assert bad.value.key == key(0)
    assert box.released == []


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (PackedMismatchError("a code beyond its range"), BadTensorError),
        # Its sender's encoder refuses it: it is no sign that the run diverges.
        (NonFiniteError("infinities"), BadTensorError),
        (CacheMismatchError("since step 7"), CacheMismatchError),
        (RuntimeError("this stage's own"), RuntimeError),
    ],
)
def test_impossible_frames_count_against_their_sender(refusal: Exception, raised: type[Exception]) -> None:
    class Refuses(CpuTransfer):
        def unpack(self, codec: Codec, packed: Tensor, spec: TensorSpec) -> tuple[Tensor, None]:
            raise refusal

    there, box = transfer(Refuses()), Box()
    box.arrived[key(0)] = codec("bf16").encode(tensor(0))
    there.begin(Incoming(key(0), SPEC), codec("bf16"), box)
    with pytest.raises(raised, match=str(refusal)) as caught:
        there.finish(key(0))
    assert type(caught.value) is raised


class Threads(CpuTransfer):
    """Notes on which thread each tensor is packed and unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def pack(self, codec: Codec, tensor: Tensor, mark: Mark | None) -> Tensor:
        self.names.append(threading.current_thread().name)
        return super().pack(codec, tensor, mark)

    def unpack(self, codec: Codec, packed: Tensor, spec: TensorSpec) -> tuple[Tensor, None]:
        self.names.append(threading.current_thread().name)
        return super().unpack(codec, packed, spec)


@pytest.mark.parametrize(("seconds", "stays"), [(SECONDS, True), (-1.0, False)])
def test_what_is_packed_sooner_than_handed_over_stays_on_its_thread(
    seconds: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE_SECONDS", seconds)
    switched: list[tuple[TimeKind, TensorKey]] = []
    device, box = Threads(), Box()
    there = TensorTransfer(
        device, lambda kind, key: nullcontext(), switch=lambda kind, key: switched.append((kind, key))
    )
    for microbatch in range(2):
        there.send(key(microbatch), codec("tah"), tensor(microbatch), None, box)
        there.drain()
    for microbatch in range(2):
        packed = codec("tah").encode(tensor(microbatch))
        assert torch.equal(box.sent[key(microbatch)], packed)
        box.arrived[key(microbatch)] = packed.clone()
        there.look_ahead([Incoming(key(microbatch), SPEC)], lambda _: codec("tah"), box)
        assert there.begun(key(microbatch))
        there.begin(Incoming(key(microbatch), SPEC), codec("tah"), box)
        expected = codec("tah").decode(packed, SPEC)
        assert torch.equal(there.finish(key(microbatch)), expected)
    assert box.released == [key(0), key(1)]
    here = threading.current_thread().name
    # How long it takes is known from the first of each.
    assert [name == here for name in device.names] == [False, stays, False, stays]
    assert switched == ([(TimeKind.ENCODE, key(1))] if stays else [])


def test_tensors_are_unpacked_one_at_a_time_on_whichever_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE_SECONDS", SECONDS)
    gate, busy = threading.Event(), threading.Lock()

    class Slow(CpuTransfer):
        def unpack(self, codec: Codec, packed: Tensor, spec: TensorSpec) -> tuple[Tensor, None]:
            assert busy.acquire(blocking=False), "two at a time"
            try:
                assert codec.name == "tah" or gate.wait(SECONDS)
                return super().unpack(codec, packed, spec)
            finally:
                busy.release()

    def waits(others: list[Any]) -> None:
        gate.set()
        others[0].result(SECONDS)

    there, box = TensorTransfer(Slow(), lambda *_: nullcontext(), switch=lambda *_: None), Box()
    names = ["tah", "fixed-3", "tah"]
    for microbatch, name in enumerate(names):
        box.arrived[key(microbatch)] = codec(name).encode(tensor(microbatch))
    there.begin(Incoming(key(0), SPEC), codec("tah"), box)
    there.finish(key(0))
    there.begin(Incoming(key(1), SPEC), codec("fixed-3"), box)
    there.begin(Incoming(key(2), SPEC), codec("tah"), box)
    monkeypatch.setattr(module, "wait", waits)
    there.finish(key(2))
    there.finish(key(1))
    assert box.released == [key(0), key(1), key(2)]


def test_an_error_at_once_is_the_one_of_the_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE_SECONDS", SECONDS)
    there, box = TensorTransfer(CpuTransfer(), lambda *_: nullcontext(), switch=lambda *_: None), Box()
    there.send(key(0), codec("tah"), tensor(0), None, box)
    there.drain()
    with pytest.raises(NonFiniteError, match="to be sent over boundary 0, microbatch 1") as raised:
        there.send(key(1), codec("tah"), torch.full(SPEC.shape, torch.inf), None, box)
    assert box.interrupted == [raised.value]
    damaged = codec("tah").encode(tensor(0))
    for microbatch in (2, 3):
        box.arrived[key(microbatch)] = damaged.clone()
        there.begin(Incoming(key(microbatch), SPEC), codec("tah"), box)
        there.finish(key(microbatch))
    damaged[-1] ^= 1
    box.arrived[key(4)] = damaged
    there.begin(Incoming(key(4), SPEC), codec("tah"), box)
    with pytest.raises(BadTensorError, match="microbatch 4"):
        there.finish(key(4))
    assert box.released == [key(2), key(3)]
    there.settle()


def test_settling_forgets_what_was_begun() -> None:
    there, box = transfer(), Box()
    box.arrived[key(0)] = torch.zeros(3, dtype=torch.uint8)
    there.look_ahead([Incoming(key(0), SPEC)], lambda _: codec("bf16"), box)
    there.settle()
    assert not there.begun(key(0))
    there.drain()


def test_a_tensor_is_unpacked_when_it_arrives_whatever_the_compute_thread_does() -> None:
    """Here it does nothing: nobody calls the transfer between the tensor's arrival and its release."""
    packed, box = codec("tah").encode(tensor(1)), Box()
    released = threading.Event()
    box.release = lambda key: released.set()  # type: ignore[method-assign]
    transfer = TensorTransfer(CpuTransfer(), lambda kind, key: nullcontext())
    transfer.look_ahead([Incoming(key(0), SPEC), Incoming(key(1), SPEC)], lambda key: codec("tah"), box)
    assert not transfer.begun(key(0))
    box.put(key(0), packed)
    assert released.wait(SECONDS) and transfer.begun(key(0)) and box.holds(key(0))
    transfer.begin(Incoming(key(0), SPEC), codec("tah"), box)
    assert torch.equal(transfer.finish(key(0)), codec("tah").decode(packed, SPEC))
    transfer.settle()
    box.put(key(1), packed)
    assert not transfer.begun(key(1)), "the step is over"


def test_who_looks_ahead_while_a_tensor_arrives_does_not_unpack_it_again() -> None:
    packed, box = codec("tah").encode(tensor(1)), Box()
    transfer = TensorTransfer(CpuTransfer(), lambda kind, key: nullcontext())
    ahead = [Incoming(key(0), SPEC)], lambda key: codec("tah"), box
    transfer.look_ahead(*ahead)
    submit, looks = transfer._unpacker.submit, threading.Event()

    def look() -> None:
        looks.set()
        transfer.look_ahead(*ahead)

    compute_thread = threading.Thread(target=look)

    def submit_late(*job: Any) -> Any:
        """The tensor is no longer watched, and its unpacking has not begun."""
        if not looks.is_set():
            compute_thread.start()
            looks.wait(SECONDS)
            compute_thread.join(0.2)
        return submit(*job)

    transfer._unpacker.submit = submit_late  # type: ignore[method-assign]
    box.put(key(0), packed)
    compute_thread.join(SECONDS)
    transfer.begin(Incoming(key(0), SPEC), codec("tah"), box)
    transfer.finish(key(0))
    transfer.settle()
    assert box.released == [key(0)]


def test_with_a_sample_cache_tensors_are_unpacked_in_the_order_of_the_stage() -> None:
    box = Box()
    transfer = TensorTransfer(CpuTransfer(), lambda kind, key: nullcontext(), in_order=True)
    transfer.look_ahead([Incoming(key(0), SPEC)], lambda key: codec("tah"), box)
    box.put(key(0), codec("tah").encode(tensor(1)))
    assert not transfer.begun(key(0)) and box.released == []
    transfer.look_ahead([Incoming(key(0), SPEC)], lambda key: codec("tah"), box)
    assert transfer.begun(key(0)) and not box.holds(key(0))
    transfer.settle()
    assert box.released == [key(0)]
