"""Checks a machine before it joins a run. Each failed check says what to do."""

import asyncio
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.common.devices import Kind
from node.telemetry.format import bytes_text, printable
from wire import descriptors, event_loop
from wire.errors import LinkError, RunError, TokenError, UserError
from wire.version import VERSION

MIN_PYTHON, END_PYTHON = (3, 11), (3, 14)
MIN_TORCH = (2, 11)
MIN_FREE_BYTES = 2_000_000_000
"""The bytes for a node's identity and logs, or for a few snapshots of a coordinator."""
MIN_WRITE_RATE = 20e6
"""The bytes per second with fsync. On a slower disk, snapshots take longer than steps."""
PROBE_BYTES = 16 << 20
MIN_OPEN_FILES = 256
MIN_MEMORY_BYTES = 1_000_000_000
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
"""One of Linux's TCP settings."""
LAB_GUIDE = Path(__file__).parents[2] / "deploy" / "lab" / "README.md"
"""A guide in `deploy`, which is beside the packages in a wheel and in a checkout."""
CONTACT_SECONDS = 5.0

if TYPE_CHECKING:
    import torch


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One result. `fix` says what to do; empty if nothing."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def ok(name: str, detail: str) -> Check:
    return Check(name=name, status=Status.OK, detail=detail)


def warn(name: str, detail: str, fix: str) -> Check:
    return Check(name=name, status=Status.WARN, detail=detail, fix=fix)


def fail(name: str, detail: str, fix: str) -> Check:
    return Check(name=name, status=Status.FAIL, detail=detail, fix=fix)


def healthy(checks: list[Check]) -> bool:
    """Whether nothing failed. Warnings do not count."""
    return all(check.status is not Status.FAIL for check in checks)


def examine(*, token: str | None = None, state_dir: Path | None = None) -> list[Check]:
    """Run all checks and, with a token, those of its run. Takes a few seconds and raises nothing."""
    return [
        check_python(),
        check_event_loop(),
        check_torch(),
        *check_device(),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        *check_congestion_control(CONGESTION_CONTROL),
        *check_slow_start(SLOW_START),
        *check_state_directory(state_dir),
        *(check_token(token) if token is not None else ()),
    ]


def default_state_root() -> Path:
    """The default parent of nodes' state directories, for all runs."""
    from wire.identity.credentials import default_directory

    return default_directory("any").parent.parent


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    system = f"{platform.system()} {platform.machine()}"
    text = f"Python {'.'.join(map(str, version))}, thinwire {VERSION}, {system}"
    if MIN_PYTHON <= version[:2] < END_PYTHON:
        return ok("python", text)
    return fail("python", text, "install Python 3.11, 3.12 or 3.13")


def check_event_loop() -> Check:
    """Check for uvloop, which all systems have that thinwire runs on."""
    name = event_loop.loop_name()
    if name.startswith("uvloop"):
        return ok("event loop", name)
    return warn("event loop", f"{name}'s own loop, slower than uvloop", "pip install uvloop")


def check_torch() -> Check:
    try:
        import torch
    except ImportError as error:
        detail = f"torch does not import: {error}"
        return fail("torch", detail, "pip install 'torch>=2.11'")
    return judge_torch(torch.__version__)


def judge_torch(version: str) -> Check:
    """Whether this torch is new enough. `version` is torch's own, such as `2.13.0+cpu`."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers >= MIN_TORCH:
        return ok("torch", f"torch {version}")
    detail = f"torch {version} is too old"
    return fail("torch", detail, "pip install 'torch>=2.11'")


def check_congestion_control(setting: Path) -> Iterator[Check]:
    """Check TCP's congestion control, which gRPC leaves to the system. No check where it is unknown."""
    if (name := _read_setting(setting)) is None:
        return
    if not name.startswith("bbr"):
        yield ok("tcp", printable(f"congestion control {name}"))
        return
    yield warn(
        "tcp",
        printable(
            f"congestion control {name}: it does not fully use a line that a node's links share ({LAB_GUIDE})"
        ),
        "where one line serves both neighbours: sysctl -w net.ipv4.tcp_congestion_control=cubic",
    )


def check_slow_start(setting: Path) -> Iterator[Check]:
    """Check whether TCP forgets a link's rate between steps. No check where it is unknown.

    It is Linux's default and only matters with long round trips, so it is no warning.
    """
    if (value := _read_setting(setting)) is None:
        return
    detail = "after a pause, connections continue at their rate"
    if value == "1":
        detail = (
            "after a pause, connections start slowly again; with round trips of tens of milliseconds it "
            f"helps to change that: sysctl -w net.ipv4.{setting.name}=0"
        )
    yield ok("tcp pauses", detail)


def _read_setting(setting: Path) -> str | None:
    try:
        return setting.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def check_device() -> Iterator[Check]:
    """The processor, and each GPU with its free memory."""
    import torch

    from kernels.common.dispatch import kind_of

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    small = memory < MIN_MEMORY_BYTES
    yield Check(
        name="memory",
        status=Status.WARN if small else Status.OK,
        detail=f"{os.cpu_count()} cores, {bytes_text(memory)} of memory",
        fix="join a run with a small model, or one with more stages" if small else "",
    )
    if torch.backends.mps.is_available():
        yield from check_mac(torch.device("mps"))
    elif not torch.cuda.is_available():
        detail = "no GPU that torch can use"
        fix = (
            "fine for small runs; larger ones need a GPU, its driver and torch's CUDA build (6 GB on disk; "
            "the CPU build: 1.2 GB)"
        )
        if torch.xpu.is_available():
            detail = "the Intel GPU cannot be used: thinwire does not compute on it"
            fix = "fine for small runs, which the CPU computes; for larger ones use a GPU of NVIDIA or AMD"
        yield warn("gpu", detail, fix)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        kind = kind_of(torch.device("cuda", index))
        yield judge_gpu(index, name, free, total, kind)
        yield check_results(torch.device("cuda", index), kind)


def check_mac(device: "torch.device") -> Iterator[Check]:
    """Check a Mac's GPU: its memory, its speed, and whether its results are right."""
    import torch

    from kernels.common.dispatch import kind_of
    from node.stage.machine_info import measure_flops

    room = bytes_text(torch.mps.recommended_max_memory())
    speeds = [measure_flops(each) / 1e12 for each in (device, torch.device("cpu"))]
    yield ok(
        "gpu",
        f"a Mac's GPU, which may take {room} of memory; {speeds[0]:.1f} TFLOP/s in float32, the CPU "
        f"has {speeds[1]:.1f}: `--device mps` computes on it, in plain torch; auto takes the CPU",
    )
    yield check_results(device, kind_of(device))


def judge_gpu(index: int, name: str, free: int, total: int, kind: Kind) -> Check:
    """Check a GPU with this many bytes free."""
    fixes = ["close other programs that use this GPU"] * (free < total / 2)
    detail = f"{name}, {bytes_text(free)} of {bytes_text(total)} free"
    if not kind.bfloat16:
        detail += ", no bfloat16"
        fixes.append(
            'join runs with training.precision = "float16", where the loss is scaled, or "float32": runs in '
            "bfloat16 refuse it"
        )
    return Check(
        name=f"gpu {index}",
        status=Status.WARN if fixes else Status.OK,
        detail=printable(detail),
        fix="; ".join(fixes),
    )


def check_results(device: "torch.device", kind: Kind) -> Check:
    """Test whether the device computes what runs with default settings need, as when a node joins."""
    from node.config.schema import RunConfig, TrainingSection
    from node.stage.self_test import prepared, words_of

    precision = "bfloat16" if kind.bfloat16 else "float16"
    config = RunConfig(training=TrainingSection(precision=precision))
    try:
        failed = prepared(config, device, default_state_root() / "self_test.json")
    except RunError as error:
        return fail(f"{device} results", str(error), "update its driver")
    if failed:
        fix = "update the driver and Triton; runs do not use these kernels until then"
        return warn(f"{device} results", words_of(failed), fix)
    detail = "codecs, layers and attention agree with their references"
    return ok(f"{device} results", detail)


def check_open_files(limits: tuple[int, int]) -> Check:
    """`limits`: (soft, hard), as from the resource module; -1 is no limit.

    Every process raises its soft limit to the hard one, so only the hard one counts.
    """
    _, hard = limits
    if hard == resource.RLIM_INFINITY or hard >= descriptors.NEEDED:
        shown = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
        return ok("open files", shown)
    few = hard < MIN_OPEN_FILES
    return Check(
        name="open files",
        status=Status.FAIL if few else Status.WARN,
        detail=f"limit is {hard}",
        fix=f"ask an administrator to raise the hard limit to {descriptors.NEEDED}, so that strangers' "
        "connections leave room for members'",
    )


def check_state_directory(wanted: Path | None) -> Iterator[Check]:
    """Check `wanted`, or where nodes keep their identities by default."""
    try:
        directory = wanted or default_state_root()
    except UserError:
        detail = "this user has no home directory for a node's key"
        fix = "set HOME, or give --state-dir"
        yield fail("state directory", detail, fix)
        return
    yield from check_disk(directory)


def check_disk(directory: Path) -> Iterator[Check]:
    """Write access, space and speed of a state directory. Leaves nothing behind."""
    directory = directory.absolute()
    try:
        place = next(parent for parent in (directory, *directory.parents) if parent.exists())
        free = shutil.disk_usage(place).free
        with tempfile.TemporaryFile(dir=place) as probe:
            began = time.perf_counter()
            probe.write(os.urandom(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
            rate = PROBE_BYTES / (time.perf_counter() - began)
    except OSError as error:
        yield fail(
            "state directory",
            f"{directory} cannot be written: {error.strerror}",
            "give a directory of your own with --state-dir, or free some space",
        )
        return
    yield ok("state directory", f"{directory} can be written")
    yield judge_disk(free, rate)


def judge_disk(free: int, rate: float) -> Check:
    """Whether `free` bytes and `rate` bytes per second are enough."""
    detail = f"{bytes_text(free)} free, {bytes_text(rate)}/s written and synced"
    fixes = []
    if free < MIN_FREE_BYTES:
        fixes.append(f"free {bytes_text(MIN_FREE_BYTES)}")
    if rate < MIN_WRITE_RATE:
        fixes.append("use a faster disk for --state-dir and --run-dir")
    status = Status.WARN if fixes else Status.OK
    return Check(name="disk", status=status, detail=detail, fix="; ".join(fixes))


def check_token(text: str) -> Iterator[Check]:
    """Check the token itself, then the coordinator at each address: reachable, its key, the clocks."""
    from wire.identity.token import JoinToken

    try:
        token = JoinToken.parse((text.split() or [""])[-1])  # the complete join line may be one argument
    except TokenError as error:
        fix = "copy the complete join line again, or ask for a new token"
        yield fail("token", str(error), fix)
        return
    places = ", ".join(token.addresses)
    yield ok("token", printable(f"run {token.run_id} at {places}"))
    checks = event_loop.run(_contact(token.addresses, token.pin))
    reached = any(check.status is Status.OK for check in checks)
    for check in checks:
        # One address is enough. Others may belong to networks in which this machine is not.
        lesser = check.status is Status.FAIL and reached
        yield replace(check, status=Status.WARN) if lesser else check


async def _contact(addresses: tuple[str, ...], pin: bytes) -> list[Check]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_contact_one(address, pin)) for address in addresses]
    return [task.result() for task in tasks]


async def _contact_one(address: str, pin: bytes) -> Check:
    from wire.bootstrap import fetch_authority

    name = printable(f"coordinator {address}")
    began = time.perf_counter()
    try:
        await fetch_authority(address, pin, CONTACT_SECONDS)
    except TokenError as error:
        fix = "ask the run's operator for a new token; do not join over this network if it happens again"
        return fail(name, str(error), fix)
    except LinkError as error:
        fix = "check that the coordinator runs and its port is open, and this machine's network and clock"
        return fail(name, str(error), fix)
    seconds = time.perf_counter() - began
    detail = f"answers in {1000 * seconds:.0f} ms with the key that the token pins; clocks agree"
    return ok(name, detail)


def checks_text(checks: list[Check]) -> str:
    """One line per check, another with its fix if any, and a verdict."""
    lines = []
    for check in checks:
        lines.append(f"{check.status.value:<4}  {check.name}: {check.detail}")
        if check.fix:
            lines.append(f"      fix: {check.fix}")
    failed = sum(check.status is Status.FAIL for check in checks)
    lines.append("this machine is ready" if not failed else f"{failed} of {len(checks)} checks failed")
    return "\n".join(lines)


def checks_json(checks: list[Check]) -> str:
    """One JSON object: `ok` and the checks."""
    return json.dumps({"ok": healthy(checks), "checks": [asdict(check) for check in checks]})
