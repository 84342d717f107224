"""The process behind `thinwire join`: enrols, computes a stage, leaves."""

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from node.config.join_options import JoinOptions
from node.display.terminal import on_ending_signals, say
from node.display.volunteer import VolunteerScreen
from node.processes.doctor import Status, check_open_files, check_python, check_torch
from node.processes.enrol import enrol
from node.processes.locks import StateDirectory, claim
from node.processes.patience import Patience, answered
from node.stage.allocator import grow_segments
from node.stage.coordinator_client import CoordinatorClient
from node.stage.give_way import GiveWay, OtherUse
from node.stage.machine_info import describe, fix_order, measure_flops
from node.stage.node_metrics import serve_metrics
from node.stage.out_of_memory import MemoryNote, device_memory_text, ran_out
from node.stage.processes import DeviceGroup, StageDevices, choose_devices
from node.stage.runtime import NodeRuntime, NodeSettings
from node.stage.session import IdentityHolder
from node.stage.stage_model import OneDevice
from node.stage.watchdog import StuckError
from node.telemetry.format import duration_text
from wire import event_loop
from wire.errors import (
    DeviceLostError,
    LinkError,
    LinkLostError,
    MemoryExhaustedError,
    ThinwireError,
    UserError,
)
from wire.identity.credentials import NodeIdentity
from wire.identity.token import JoinToken
from wire.messages import Finish
from wire.pacing import Pacer

log = logging.getLogger(__name__)

INTERRUPTED = 130
SOON_SECONDS = 300.0
"""The seconds for which every node waits for a run that continues soon."""
START_SECONDS = 10.0
"""The seconds for a coordinator to answer a node that does not wait."""
IDLE_END_SECONDS = 2.8
"""The seconds after which a node without a stage has left, whatever it is doing."""


def run_node(token_text: str, options: JoinOptions) -> int:
    """Run the node until the run ends or the user leaves. Returns the exit code."""
    token = JoinToken.parse(token_text)
    _check_machine()
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = choose_devices(options.device, options.gpus)
    directory = claim(token.run_id, options.state_dir)
    try:
        code = event_loop.run(_serve(token, options, chosen, directory.path))
    except (StuckError, DeviceLostError) as error:
        _end(error, directory)
    except Exception as error:  # torch raises several types when memory runs out; others pass
        if not ran_out(error):
            raise
        first = chosen[0]
        memory = device_memory_text(first)
        _end(MemoryExhaustedError(f"{first} ran out of memory before it had a stage: {memory}"), directory)
    finally:
        directory.release()
    if code == INTERRUPTED:
        # Everything is saved, and the interpreter would wait for threads that are still compiling.
        os._exit(code)
    return code


def _end(error: ThinwireError, directory: StateDirectory) -> NoReturn:
    """Exit immediately, because the interpreter would wait for a stuck thread or a device's kernels."""
    say(f"thinwire: error: {error}")
    directory.release()
    os._exit(error.exit_code)


def _check_machine() -> None:
    """Run `doctor`'s quick checks. A failure ends the join; a warning is logged."""
    checks = [
        check_python(),
        check_torch(),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]
    for check in checks:
        if check.status is Status.FAIL:
            raise UserError(f"{check.name}: {check.detail}; {check.fix}")
        if check.status is Status.WARN:
            log.warning("%s: %s; %s", check.name, check.detail, check.fix)


async def _serve(
    token: JoinToken, options: JoinOptions, chosen: tuple[torch.device, ...], directory: Path
) -> int:
    device = chosen[0]
    grow_segments(device)
    fix_order(device)
    other_use = _other_use(device, options)
    note = MemoryNote(directory, _most_bytes(options))
    hardware = note.limit(
        describe(
            chosen,
            tensor_parallel=options.tensor_parallel,
            most_bytes=note.most_bytes,
            most_host_bytes=None
            if options.max_host_memory_gb is None
            else int(options.max_host_memory_gb * 1e9),
        )
    )
    screen = VolunteerScreen(json_lines=options.json)
    screen.now("enrolling")
    identity, control_address = await enrol(
        token, directory, hardware, Patience(options.wait_seconds, screen.waiting)
    )
    screen.now("measuring this machine's speed")
    settings = NodeSettings(
        control_address=control_address,
        listen=options.listen,
        advertise=options.advertise,
        name=options.name,
        relay_rate=options.relay_mbit * 1e6 / 8,
        maps_port=options.map_port,
        devices=_devices(chosen, options),
        hardware=hardware,
        flops=len(chosen) * await asyncio.to_thread(measure_flops, device),
        cache_directory=directory / "snapshots",
        cache_bytes=int(options.max_disk_gb * 1e9) or shutil.disk_usage(directory).free // 2,
        allows=options.allows,
        give_way=None if other_use is None else GiveWay(other_use, options.yield_gpu),
        pacer=Pacer(options.max_bandwidth_mbit * 1e6 / 8) if options.max_bandwidth_mbit else None,
    )

    async def join_again() -> NodeIdentity:
        return (await enrol(token, directory, hardware))[0]

    holder = IdentityHolder(identity, directory, join_again)
    reach = _Reach(control_address, holder, screen.waiting)
    with _ended_by_signals():
        await reach.at_start(max(options.wait_seconds, START_SECONDS))
    latest: list[NodeRuntime] = []
    async with contextlib.AsyncExitStack() as stack:
        if options.metrics:
            body = partial(_metrics, latest)
            address = await stack.enter_async_context(serve_metrics(options.metrics, body))
            screen(f"metrics at http://{address}/metrics")
        while True:
            runtime = NodeRuntime(settings, holder, screen)
            if latest:
                runtime.progress.goes_on(latest[-1].progress)
            latest[:] = [runtime]
            try:
                finish, interrupted = await _until_done(runtime)
            except MemoryExhaustedError as error:
                if error.need:
                    note.write(hardware, error.need)
                raise
            except LinkLostError as error:
                if not options.wait_seconds:
                    raise
                finish, interrupted = Finish(reason=str(error), failed=True, paused=True), False
            screen(finish.reason)
            seconds = max(options.wait_seconds, SOON_SECONDS if finish.soon else 0.0)
            if interrupted or not (finish.paused and seconds):
                if thanks := runtime.progress.thanks():
                    screen(thanks)
                return INTERRUPTED if interrupted else 1 if finish.failed else 0
            screen(f"waiting up to {duration_text(seconds)} for the run to continue; Ctrl-C ends")
            with _ended_by_signals():
                goes_on = await reach.again(seconds)
            if not goes_on:
                screen(f"the run did not continue within {duration_text(seconds)}: this node ends")
                return 1
            settings = replace(settings, devices=_devices(chosen, options))


class _Reach:
    """Waits for the coordinator's control port, to which nodes with a certificate connect."""

    def __init__(self, address: str, holder: IdentityHolder, show: Callable[[str, float], None]) -> None:
        self._address = address
        self._holder = holder
        self._show = show

    async def at_start(self, seconds: float) -> None:
        """Raise LinkError if it does not answer in time, Refused if this node is evicted."""
        what = f"asking the coordinator at {self._address}"
        if not await answered(self._asks, Patience(seconds, self._show), what):
            raise LinkError(
                f"the coordinator's port for members at {self._address} did not answer for "
                f"{duration_text(seconds)}: is it open to this machine, and is the coordinator running?"
            )

    async def again(self, seconds: float) -> bool:
        """Whether the coordinator of a stopped run answers again in time."""
        return await answered(self._asks, Patience(seconds, self._show), "waiting for the run to continue")

    async def _asks(self) -> bool:
        holder = self._holder
        if holder.current.expires_at <= time.time():
            if holder.join_again is None:
                return False
            try:
                holder.replace(await holder.join_again())
            except LinkError:
                return False
        client = CoordinatorClient(self._address, lambda: holder.current, 0.0)
        try:
            return await client.answers()
        finally:
            await client.close()


def _metrics(latest: Sequence[NodeRuntime]) -> bytes:
    return latest[-1].metrics() if latest else b""


def _other_use(device: torch.device, options: JoinOptions) -> OtherUse | None:
    """Raises UserError if the owner also uses the GPU, and its driver does not report who uses it."""
    if not options.yield_gpu:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        raise UserError(
            f"--yield-gpu is for GPUs of NVIDIA, and this node computes on {device}: leave it out"
        )
    # Not the GPU's number, which CUDA_VISIBLE_DEVICES changes.
    use = OtherUse(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    use.start()
    return use


def _devices(chosen: tuple[torch.device, ...], options: JoinOptions) -> StageDevices:
    if len(chosen) == 1:
        return OneDevice(chosen[0])
    return DeviceGroup(chosen, options.threads, options.tensor_parallel, _most_bytes(options))


def _most_bytes(options: JoinOptions) -> int:
    return int(options.max_memory_gb * 1e9)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside the block, Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt."""
    task = asyncio.current_task()
    assert task is not None
    with on_ending_signals(lambda _: task.cancel()):
        try:
            yield
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _end_if_idle(runtime: NodeRuntime) -> None:
    if not runtime.holds_state:
        os._exit(INTERRUPTED)


async def _until_done(runtime: NodeRuntime) -> tuple[Finish, bool]:
    """Run until the end. The first Ctrl-C, SIGTERM or SIGHUP leaves after a snapshot; the next quits
    immediately."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    interrupts = 0

    def interrupt(number: signal.Signals) -> None:
        nonlocal interrupts
        # A closing terminal sends SIGHUP twice: from its shell and from the kernel.
        if number is signal.SIGHUP and interrupts:
            return
        interrupts += 1
        if interrupts == 1:
            if runtime.holds_state:
                log.warning("leaving after this step and a snapshot; press Ctrl-C again to quit at once")
            else:
                log.warning("leaving")
                # The compute thread may be compiling, and there is nothing to save.
                loop.call_later(IDLE_END_SECONDS, _end_if_idle, runtime)
            runtime.leave("the volunteer asked to leave")
        else:
            task.cancel()

    with on_ending_signals(interrupt):
        try:
            return await runtime.run(), interrupts > 0
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
