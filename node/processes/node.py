"""The process behind `thinwire join`: enrol, serve a stage, leave."""

import asyncio
import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

import torch

from node.config.join_options import JoinOptions
from node.display.terminal import Screen, ending_signals, say
from node.parallel.processes import DeviceGroup, choose_devices
from node.processes.doctor import (
    Status,
    check_open_files,
    check_packages,
    check_python,
    check_torch,
    package_owners,
)
from node.processes.enrol import enrol
from node.processes.locks import StateDirectory, claim
from node.stage.machine_info import describe, fix_order, measure_flops
from node.stage.node_metrics import serve_metrics
from node.stage.out_of_memory import MemoryNote, ran_out, room
from node.stage.runtime import NodeRuntime, NodeSettings
from node.stage.session import IdentityHolder
from node.stage.stage_model import OneDevice, StageDevices
from node.stage.watchdog import StuckError
from wire import event_loop
from wire.errors import DeviceLostError, MemoryExhaustedError, ThinwireError, UserError
from wire.identity.credentials import NodeIdentity
from wire.identity.token import JoinToken
from wire.messages import Finish
from wire.pacing import Pacer

log = logging.getLogger(__name__)

INTERRUPTED = 130


def run_node(token_text: str, options: JoinOptions) -> int:
    """Serve a stage until the run ends or the user leaves; returns the exit code."""
    token = JoinToken.parse(token_text)
    _check_machine()
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = choose_devices(options.device, options.gpus)
    directory = claim(token.run_id, options.state_dir)
    try:
        return event_loop.run(_serve(token, options, chosen, directory.path))
    except (StuckError, DeviceLostError) as error:
        _end(error, directory)
    except Exception as error:
        if not ran_out(error):
            raise
        first = chosen[0]
        _end(
            MemoryExhaustedError(f"{first} ran out of memory before it had a stage: {room(first)}"), directory
        )
    finally:
        directory.release()


def _end(error: ThinwireError, directory: StateDirectory) -> NoReturn:
    """Exit at once: the interpreter would wait for a stuck thread or for a device's kernels."""
    say(f"thinwire: error: {error}")
    directory.release()
    os._exit(error.exit_code)


def _check_machine() -> None:
    """Run `doctor`'s quick checks: a failure ends the join, a warning is logged."""
    checks = [
        check_python(),
        check_torch(),
        check_packages(package_owners()),
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
    fix_order(device)
    note = MemoryNote(directory, _most_bytes(options))
    hardware = note.limit(
        describe(chosen, tensor_parallel=options.tensor_parallel, most_bytes=note.most_bytes)
    )
    identity, control_address = await enrol(token, directory, hardware)
    settings = NodeSettings(
        control_address=control_address,
        listen=options.listen,
        advertise=options.advertise,
        devices=_devices(chosen, options),
        hardware=hardware,
        flops=len(chosen) * await asyncio.to_thread(measure_flops, device),
        cache_directory=directory / "snapshots",
        cache_bytes=shutil.disk_usage(directory).free // 2,
        pacer=Pacer(options.max_bandwidth_mbit * 1e6 / 8) if options.max_bandwidth_mbit else None,
    )
    tell = Reporter(json_lines=options.json)

    async def join_again() -> NodeIdentity:
        return (await enrol(token, directory, hardware))[0]

    runtime = NodeRuntime(settings, IdentityHolder(identity, directory, join_again), tell)
    async with contextlib.AsyncExitStack() as stack:
        if options.metrics:
            address = await stack.enter_async_context(serve_metrics(options.metrics, runtime.metrics))
            tell(f"metrics at http://{address}/metrics")
        try:
            finish, interrupted = await _until_done(runtime)
        except MemoryExhaustedError as error:
            if error.need:
                note.write(hardware, error.need)
            raise
    tell(finish.reason)
    if interrupted:
        return INTERRUPTED
    return 1 if finish.failed else 0


def _devices(chosen: tuple[torch.device, ...], options: JoinOptions) -> StageDevices:
    if len(chosen) == 1:
        return OneDevice(chosen[0])
    return DeviceGroup(chosen, options.threads, options.tensor_parallel, _most_bytes(options))


def _most_bytes(options: JoinOptions) -> int:
    return int(options.max_memory_gb * 1e9)


async def _until_done(runtime: NodeRuntime) -> tuple[Finish, bool]:
    """Run until the end. The first Ctrl-C, SIGTERM or SIGHUP leaves after a snapshot; the next quits at
    once."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    interrupts = 0

    def interrupt(number: signal.Signals) -> None:
        nonlocal interrupts
        # A closing terminal sends SIGHUP twice, by its shell and by the kernel.
        if number is signal.SIGHUP and interrupts:
            return
        interrupts += 1
        if interrupts == 1:
            log.warning("leaving after this step and a snapshot; press Ctrl-C again to quit at once")
            runtime.leave("the volunteer asked to leave")
        else:
            task.cancel()

    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await runtime.run(), interrupts > 0
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Reporter:
    """Print progress on stdout, as lines of text or of JSON."""

    def __init__(self, *, json_lines: bool) -> None:
        self._json = json_lines
        self._screen = Screen("this node")

    def __call__(self, text: str) -> None:
        line = json.dumps({"event": "node", "text": text}) if self._json else text
        self._screen.attempt(lambda: self._write(line))

    def _write(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
