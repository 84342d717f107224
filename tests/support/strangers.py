"""Strangers at a run's ports, without a certificate: they hold connections open, or ask to join in masses.

`besiege` runs one `Siege` against a run of two stages in which each process may have 1,024 descriptors.
"""

import asyncio
import contextlib
import resource
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio

from node.telemetry.events import NodeJoined, RunFinished, StepDone, from_json
from tests.support.fault_run import small
from tests.support.process import Coordinator, Launch, Process, StuckError
from tests.support.run_harness import Run, undisturbed
from wire.errors import ThinwireError
from wire.identity.authority import certificate_to_pem
from wire.identity.bootstrap import fetch_authority
from wire.identity.credentials import server_name_options
from wire.identity.names import coordinator_server_name
from wire.identity.token import JoinToken
from wire.v1 import enrolment_pb2
from wire.version import PROTOCOL, VERSION

DESCRIPTORS = 1024
LIMITED = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh")
"""Starts a command that may have so many descriptors."""
TICK_SECONDS = 0.05
JOIN_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Siege:
    """What strangers do, and at which port: the coordinator's, `join`, or a node's `link`."""

    name: str
    what: str
    port: str
    idle: int = 0
    """Connections held open that never say a word."""
    idle_a_second: int = 0
    """New ones after that, for which the oldest are closed."""
    joins_a_second: int = 0
    """Requests to join with made-up tokens."""
    seconds: float = 6.0


@dataclass(frozen=True, kw_only=True)
class Withstood:
    """What a siege did to a run."""

    name: str
    what: str
    ended: bool
    """The run reached its last step."""
    bits_equal: bool
    speed: float
    """Steps a second during the siege, over those before it."""
    join_seconds: float | None
    """From the start of an honest node to its admission, during the siege; None: not within a minute."""
    reached: int
    """Connections or requests of the strangers."""
    line: str
    """How the run ended, if not well."""

    @property
    def good(self) -> bool:
        """The run ends as an undisturbed one, and an honest node can join meanwhile."""
        return self.ended and self.bits_equal and self.join_seconds is not None


SIEGES = (
    Siege(name="idle-join", what="hold idle connections to the coordinator's port", port="join", idle=1300),
    Siege(name="idle-link", what="hold idle connections to a node's link port", port="link", idle=1300),
    Siege(name="join-flood", what="ask to join with made-up tokens", port="join", joins_a_second=800),
)


def at_full_size(siege: Siege) -> Siege:
    """10,000 idle connections and 500 new ones a second, or the same flood, for five minutes."""
    idle = {"idle": 10_000, "idle_a_second": 500} if siege.idle else {}
    return replace(siege, **idle, seconds=300.0)


def besiege(siege: Siege, directory: Path, *, steps: int, launch: Launch) -> Withstood:
    """Run one siege. A third node joins meanwhile; `launch` starts it, and should do so quickly."""
    config = small(steps=steps, snapshot_every=max(20, steps // 4))
    config = replace(config, pipeline=replace(config.pipeline, stages=2))
    done: list[float] = []

    def note(process: Process, line: str | None) -> None:
        if isinstance(process, Coordinator) and line and isinstance(from_json(line), StepDone):
            done.append(time.monotonic())

    with Run(directory, config, launch=launch, listener=note) as run:
        coordinator = run.start(wrapper=LIMITED)
        for _ in range(2):
            run.add_node(wrapper=LIMITED)
        coordinator.wait_step(steps // 10)
        join_port = int(config.coordinator.listen.rpartition(":")[2])
        dialled = coordinator.wait_event(NodeJoined).address.rpartition(":")[2]
        port = int(dialled) if siege.port == "link" else join_port
        token = coordinator.token
        joined: float | None = None
        began = time.monotonic()
        with _strangers(siege, port, JoinToken.parse(token)) as reached:
            started = time.monotonic()
            with contextlib.suppress(StuckError):
                spare = run.add_node(run.new_token())
                spare.wait_line(lambda line: "joined run" in line, JOIN_SECONDS)
                joined = round(time.monotonic() - started, 2)
            _wait_until(began + siege.seconds, coordinator)
            ended_at = time.monotonic()
        code: int | None = None
        with contextlib.suppress(StuckError):
            code = coordinator.wait_exit()
        ended = code == 0 and len(run.losses) == steps
        expected = undisturbed(run.config) if ended else None
        finished = coordinator.all(RunFinished)
        return Withstood(
            name=siege.name,
            what=siege.what,
            ended=ended,
            bits_equal=expected is not None
            and run.losses == expected.losses
            and run.weights_sha256 == expected.weights_sha256,
            speed=round(_rate(done, began, ended_at) / _rate(done, done[0], began), 2),
            join_seconds=joined,
            reached=reached[0],
            line="" if ended else finished[-1].reason if finished else "nothing happened any more",
        )


def _rate(done: list[float], began: float, ended: float) -> float:
    """Steps a second in an interval, or in the part of it before the last step."""
    ended = min(ended, done[-1]) if done[-1] > began else ended
    return sum(began < at <= ended for at in done) / max(ended - began, 1e-3)


def _wait_until(when: float, coordinator: Coordinator) -> None:
    """Wait for the time, or for the run's end."""
    with contextlib.suppress(StuckError):
        coordinator.wait_exit(max(0.0, when - time.monotonic()))


@contextlib.contextmanager
def _strangers(siege: Siege, port: int, token: JoinToken) -> Iterator[list[int]]:
    """The siege goes on inside the block; gives a list of one number: connections or requests so far."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reached, over = [0], threading.Event()
    there = threading.Event()

    def work() -> None:
        if siege.joins_a_second:
            asyncio.run(_ask_to_join(siege, port, token, reached, over, there))
        else:
            _idle(siege, port, reached, over, there)

    thread = threading.Thread(target=work, name=siege.name)
    thread.start()
    try:
        assert there.wait(JOIN_SECONDS), "the strangers did not come"
        yield reached
    finally:
        over.set()
        thread.join()


def _idle(siege: Siege, port: int, reached: list[int], over: threading.Event, there: threading.Event) -> None:
    """Open connections until `idle` are open, 2,000 a second, and then `idle_a_second`."""
    open_ones: deque[socket.socket] = deque()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [one.close() for one in open_ones])
        while not over.wait(TICK_SECONDS):
            full = len(open_ones) >= siege.idle
            if full:
                there.set()
            for _ in range(int((siege.idle_a_second if full else 2000) * TICK_SECONDS)):
                one = socket.socket()
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                    one.connect(("127.0.0.1", port))
                open_ones.append(one)
                reached[0] += 1
            while len(open_ones) > siege.idle:
                open_ones.popleft().close()


async def _ask_to_join(
    siege: Siege,
    port: int,
    token: JoinToken,
    reached: list[int],
    over: threading.Event,
    there: threading.Event,
) -> None:
    """Ask with tokens that were never made, over as many connections as answer, until it is over."""
    address = f"127.0.0.1:{port}"
    authority = await fetch_authority(address, token.pin)
    credentials = grpc.ssl_channel_credentials(certificate_to_pem(authority))
    options = server_name_options(coordinator_server_name(token.run_id))
    options.append(("grpc.use_local_subchannel_pool", 1))
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(8):
            channel = await stack.enter_async_context(grpc.aio.secure_channel(address, credentials, options))
            calls.append(
                channel.unary_unary(
                    "/thinwire.wire.v1.Enrolment/Join",
                    request_serializer=enrolment_pb2.JoinRequest.SerializeToString,
                    response_deserializer=enrolment_pb2.JoinReply.FromString,
                )
            )

        async def ask(number: int) -> None:
            request = enrolment_pb2.JoinRequest(
                version=VERSION,
                protocol=PROTOCOL,
                run_id=token.run_id,
                token_id=secrets.token_hex(len(token.token_id) // 2),
                secret=secrets.token_bytes(len(token.secret)),
            )
            with contextlib.suppress(grpc.aio.AioRpcError, ThinwireError):
                await calls[number % len(calls)](request, timeout=5)

        async with asyncio.TaskGroup() as group:
            asked = 0
            began = time.monotonic()
            while not over.is_set():
                await asyncio.sleep(TICK_SECONDS)
                due = int((time.monotonic() - began) * siege.joins_a_second)
                for number in range(asked, due):
                    group.create_task(ask(number))
                asked = reached[0] = due
                there.set()
