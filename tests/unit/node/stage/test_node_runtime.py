"""A node's compute thread: its jobs count as work, and the process can end while it hangs."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from node.config.join_options import OwnerAllows
from node.config.schema import PipelineSection, RunConfig, SyncSection, TrainingSection
from node.display.volunteer import VolunteerScreen
from node.run_file.loader import to_json
from node.stage import session as module
from node.stage import watchdog
from node.stage.inbox import STALL_SECONDS
from node.stage.runtime import NodeRuntime, NodeSettings
from node.stage.session import IdentityHolder, renew_certificates
from node.stage.stage_model import OneDevice
from node.stage.watchdog import STUCK_SECONDS, ComputeThread, StuckError, check_progress
from node.telemetry.clock import WAITS, StageClock, TimeKind
from tests.support.fault_prefork import Prefork
from tests.support.pki import new_authority, new_node
from wire.errors import LinkError, LinkLostError, RefusalCode, Refused, RunError
from wire.identity.authority import CertificateAuthority
from wire.identity.credentials import NodeIdentity, load_key
from wire.identity.enrolment import Hardware
from wire.messages import AwaitedSums, Finish, Heartbeat, Welcome
from wire.telemetry import Telemetry

SECONDS = 30.0
WELCOME = Welcome(node_id="node-1", config_json=to_json(RunConfig()), heartbeat_seconds=0.01)


@pytest.fixture
def authority() -> CertificateAuthority:
    return new_authority()


@pytest.fixture
async def runtime(tmp_path: Path, authority: CertificateAuthority) -> NodeRuntime:
    settings = NodeSettings(
        control_address="127.0.0.1:1",
        listen="127.0.0.1:0",
        advertise="",
        devices=OneDevice(torch.device("cpu")),
        hardware=Hardware("cpu", 1, 0),
        flops=1.0,
        cache_directory=tmp_path,
        cache_bytes=0,
        allows=OwnerAllows(),
    )
    holder = IdentityHolder(new_node(authority), tmp_path)
    return NodeRuntime(settings, holder, VolunteerScreen(json_lines=True))


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Work that waits for it hangs for the whole test."""
    event = threading.Event()
    yield event
    event.set()


def alone(runtime: NodeRuntime, monkeypatch: pytest.MonkeyPatch, *messages: Any) -> None:
    """Its coordinator says this, and nothing more."""

    async def rate() -> float:
        return 1.0

    async def session(hello: Any, handle: Callable[[Any], Awaitable[None]]) -> None:
        for message in messages:
            await handle(message)
        await asyncio.Event().wait()

    monkeypatch.setattr(runtime._client, "measure_download", rate)
    monkeypatch.setattr(runtime._session, "run", session)


@contextlib.asynccontextmanager
async def running(runtime: NodeRuntime) -> AsyncIterator["asyncio.Task[Finish]"]:
    async with asyncio.timeout(SECONDS):
        yield asyncio.create_task(runtime.run())


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)


async def test_all_that_the_compute_thread_does_is_work_and_then_it_waits(runtime: NodeRuntime) -> None:
    compute = runtime._compute
    clock = compute.clock
    assert clock.running()[0] is TimeKind.WAIT_COORDINATOR
    assert (await compute.run(clock.running))[0] is TimeKind.OPTIMIZER
    # A step ends in another kind, and so does one that breaks off.
    await compute.run(lambda: clock.switch(TimeKind.BACKWARD))
    assert clock.running()[0] is TimeKind.WAIT_COORDINATOR
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    assert clock.running()[0] is TimeKind.WAIT_COORDINATOR


@pytest.mark.parametrize("failed", [False, True])
async def test_a_node_whose_run_is_over_does_not_wait_for_a_thread_that_hangs(
    runtime: NodeRuntime, monkeypatch: pytest.MonkeyPatch, over: threading.Event, failed: bool
) -> None:
    alone(runtime, monkeypatch)
    async with running(runtime) as task:
        hung = asyncio.create_task(runtime._compute.run(over.wait))
        runtime._end(Finish(reason="over", failed=failed))
        # Nobody looks before its time: it may be at a long piece of work.
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
        monkeypatch.setattr(watchdog, "STUCK_SECONDS", 0.1)
        with pytest.raises(StuckError, match="does not return"):
            await task
        hung.cancel()


async def test_a_node_whose_run_is_over_finishes_its_current_work(
    runtime: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(runtime, monkeypatch)
    started, go = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go.wait()

    async with running(runtime) as task:
        at_it = asyncio.create_task(runtime._compute.run(work))
        await asyncio.to_thread(started.wait)
        runtime._end(Finish(reason="over", failed=False))
        assert not (await asyncio.wait([task], timeout=0.1))[0]
        go.set()
        assert await task == Finish(reason="over", failed=False)
        await at_it


@pytest.mark.parametrize("ahead", [0.0, 6 * 3600.0])
async def test_a_certificate_is_renewed_and_a_clock_by_which_each_has_ended_ends_the_node(
    runtime: NodeRuntime, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    first, asked = runtime._identity.current, 0
    key = load_key(first.key_pem).public_key()

    async def renew(csr_der: bytes) -> bytes:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise LinkLostError("the coordinator is away")
        if asked == 3:
            raise Refused(RefusalCode.EVICTED, "enough")
        issued = time.time() - ahead
        return authority.issue_node(key, first.node_id, timedelta(hours=24), issued)

    monkeypatch.setattr(module, "RENEW_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(NodeIdentity, "renewal_time", 0.0)
    monkeypatch.setattr(runtime._client, "renew", renew)
    error, line = (LinkError, "set the clock") if ahead else (Refused, "enough")
    async with asyncio.timeout(SECONDS):
        with pytest.raises(error, match=line):
            await renew_certificates(runtime._identity, runtime._client)
    assert (runtime._identity.current == first) == bool(ahead)


async def test_a_node_suspended_past_its_certificate_says_so_and_joins_again_with_its_token(
    runtime: NodeRuntime,
    authority: CertificateAuthority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, attempts = runtime._identity.current, 0
    key = load_key(first.key_pem).public_key()
    old = authority.issue_node(key, first.node_id, timedelta(hours=1), time.time() - 2 * 3600)
    runtime._identity.current = first.renewed(old)
    with pytest.raises(LinkError, match=r"certificate expired at .* UTC, while the machine was suspended"):
        await runtime._client.session(runtime._hello(1, 0.0), asyncio.Queue(), AsyncMock(), lambda: None)
    joined = asyncio.Event()

    async def join_again() -> NodeIdentity:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise LinkError("nothing answers")
        joined.set()
        pem = authority.issue_node(key, first.node_id, timedelta(hours=1), time.time())
        return first.renewed(pem)

    async def renew(csr_der: bytes) -> bytes:
        raise AssertionError("the control port takes no expired certificate")

    monkeypatch.setattr(module, "RENEW_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(runtime._client, "renew", renew)
    runtime._identity.join_again = join_again
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        renewing = group.create_task(renew_certificates(runtime._identity, runtime._client))
        await joined.wait()
        while not runtime._identity.current.is_valid(time.time()):  # noqa: ASYNC110 - saved on a thread
            await asyncio.sleep(0.01)
        renewing.cancel()
    assert "expired at" in caplog.text and "joining again with the token" in caplog.text


async def test_a_node_lives_while_its_devices_start(
    runtime: NodeRuntime, monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    alone(runtime, monkeypatch, WELCOME)
    heard: asyncio.Queue[Any] = asyncio.Queue()
    monkeypatch.setattr(runtime._session, "post", heard.put_nowait)
    monkeypatch.setattr(runtime, "_make_executor", lambda *_: over.wait())
    async with running(runtime) as task:
        for _ in range(3):
            beat = await heard.get()
            assert isinstance(beat, Heartbeat) and beat.preparing
        assert runtime._compute.clock.running()[0] is TimeKind.OPTIMIZER, "the watchdog looks at it"
        task.cancel()
        over.set()
        await asyncio.wait([task])


async def test_heartbeats_say_which_sums_a_node_waits_for(
    runtime: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(runtime._session, "post", said.append)
    member: Any = SimpleNamespace(telemetry=Telemetry, inbox=SimpleNamespace(awaited=AwaitedSums(2, True)))
    runtime._heartbeat()
    runtime._member = member
    runtime._heartbeat()
    assert [beat.awaited for beat in said] == [None, AwaitedSums(2, True)]


async def test_a_gpu_without_products_in_fp8_refuses_a_run_that_has_them(
    runtime: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = TrainingSection(precision="bfloat16", compute="fp8")
    welcome = replace(WELCOME, config_json=to_json(RunConfig(training=training)))
    runtime._settings = replace(
        runtime._settings,
        devices=OneDevice(torch.device("cuda", 0)),
        hardware=replace(runtime._settings.hardware, device="NVIDIA A100"),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    named = SimpleNamespace(name="NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: named)
    async with asyncio.TaskGroup() as group:
        with pytest.raises(RunError, match=r"multiplies in FP8 .* this node's NVIDIA A100 cannot: join with"):
            await runtime._welcomed(group, welcome)


async def test_a_node_of_two_devices_refuses_a_run_of_local_steps(runtime: NodeRuntime) -> None:
    config = RunConfig(pipeline=PipelineSection(groups=2), sync=SyncSection(every=2))
    runtime._settings = replace(runtime._settings, hardware=replace(runtime._settings.hardware, devices=2))
    async with asyncio.TaskGroup() as group:
        with pytest.raises(RunError, match=r"one device per node: .* `thinwire join --gpus 1`"):
            await runtime._welcomed(group, replace(WELCOME, config_json=to_json(config)))


async def test_devices_that_never_start_end_the_node(
    runtime: NodeRuntime, monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    monkeypatch.setattr(watchdog, "STUCK_SECONDS", 0.1)
    alone(runtime, monkeypatch, WELCOME)
    monkeypatch.setattr(runtime, "_make_executor", lambda *_: over.wait())
    async with running(runtime) as task:
        with pytest.raises(StuckError, match="does not return"):
            await task


# ---- a compute thread that hangs is noticed, one that works or waits is not, and its process ends


HANGS = """
import threading
from pathlib import Path
from types import SimpleNamespace
import node.processes.node as main
from node.config.join_options import JoinOptions
from node.stage.watchdog import StuckError

async def serve(*_):
    threading.Thread(target=threading.Event().wait).start()  # never ends, and the interpreter waits for it
    ENDS

main._serve = serve
main._check_machine = lambda: None
main.JoinToken = SimpleNamespace(parse=lambda _: SimpleNamespace(run_id="r"))
main.claim = lambda *_: SimpleNamespace(path=Path("."), release=lambda: print("released", flush=True))
main.run_node("token", JoinOptions(device="cpu"))
"""


@pytest.mark.parametrize("kind", list(TimeKind))
def test_only_work_can_take_too_long(kind: TimeKind) -> None:
    check_progress(kind, STUCK_SECONDS)
    if kind in WAITS:
        check_progress(kind, 100 * STUCK_SECONDS)
    else:
        with pytest.raises(StuckError, match=f"in {kind} for 301 s"):
            check_progress(kind, STUCK_SECONDS + 1)


def test_neighbours_are_blamed_later() -> None:
    assert STUCK_SECONDS + watchdog.LOOK_SECONDS < STALL_SECONDS


async def test_the_clock_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.001)
    now = 0.0
    clock = StageClock(lambda: now)
    clock.switch(TimeKind.FORWARD)
    watching = asyncio.create_task(ComputeThread(clock).watch())
    now = STUCK_SECONDS
    await asyncio.sleep(0.05)
    assert not watching.done()
    now += 1
    with pytest.raises(StuckError):
        async with asyncio.timeout(60):
            await watching


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        ('raise StuckError("stuck for good")', 1, "thinwire: error: stuck for good"),
        # Its volunteer left while a thread compiles.
        ("return main.INTERRUPTED", 130, ""),
    ],
)
def test_the_process_ends_although_its_thread_does_not(
    ends: str, code: int, words: str, prefork: Prefork, tmp_path: Path
) -> None:
    script, complaints = tmp_path / "hangs.py", tmp_path / "stderr"
    script.write_text(HANGS.replace("ENDS", ends))
    with complaints.open("wb") as stderr:
        process = prefork.popen(
            (sys.executable, str(script)), stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert process.stdout is not None
    with process.stdout as said:
        assert said.read() == "released\n"
    assert process.wait(150) == code
    assert complaints.read_text().strip() == words
