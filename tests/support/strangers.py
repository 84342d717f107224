"""Strangers at a run's ports, without a certificate of it: they hold connections open, talk garbage, or ask
to join in masses.

`besiege` runs one `Siege` against a run of two stages in which each process may have 1,024 descriptors. The
strangers are a process of their own, and may have a core of their own, so that what they cost is not held
against the run:

    python -m tests.support.strangers SIEGE PORT TOKEN
"""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import grpc.aio

from node.processes.enrol import enrol
from node.processes.patience import Patience
from node.telemetry.events import NodeJoined, RunFinished
from tests.support.fault_prefork import DESCRIPTORS_VARIABLE
from tests.support.fault_run import small
from tests.support.hostile import KINDS, Crowd
from tests.support.memory_pipeline import reference_run
from tests.support.paths import python_path
from tests.support.process import Child, Coordinator, Launch, StuckError
from tests.support.run_harness import Expected, Run
from tests.support.siege_watch import SiegeWatch
from wire.bootstrap import fetch_authority
from wire.channels import open_channel
from wire.errors import ThinwireError
from wire.identity.authority import certificate_to_pem
from wire.identity.credentials import NodeIdentity, server_name_options
from wire.identity.enrolment import Hardware
from wire.identity.names import coordinator_server_name
from wire.identity.token import JoinToken
from wire.pacing import RECONNECT_SECONDS, Backoff
from wire.v1 import control_pb2, control_pb2_grpc, enrolment_pb2
from wire.version import PROTOCOL, VERSION

DESCRIPTORS = 1024
MOST_STEPS = 200_000
"""More than are done before the operator ends the run."""
SNAPSHOT_EVERY = 200
WARM_STEPS = 10
TICK_SECONDS = 0.05
JOIN_SECONDS = 60.0
ASKS = 5
RECONNECT_EVERY = 2.0
"""Seconds between two new connections of a member."""
RECONNECT_LIMIT = 30.0
INTERRUPTED = 130
MOST_GROWTH_MB = 64
"""What the coordinator's memory may grow by under a siege."""


@dataclass(frozen=True, kw_only=True)
class Siege:
    """What strangers do, and at which port: the coordinator's, `join`, or a node's `link`."""

    name: str
    what: str
    port: str
    idle: int = 0
    """Connections that are held open, those that the port has dropped included."""
    idle_a_second: int = 0
    """New connections a second after that; each closes the oldest one."""
    kinds: tuple[str, ...] = ("silent",)
    """What they are, by turns (`tests.support.hostile.KINDS`)."""
    joins_a_second: int = 0
    """Requests to join with made-up tokens."""
    seconds: float = 6.0
    rounds: int = 1
    """Sieges of so many seconds, each between two calm times."""
    calm_seconds: float = 1.0
    """Seconds of each calm time, for comparison."""
    upload_mbit: float = 0.4
    """Of each node with a stage: a step then takes a third of a second, and the run to compare with is short.
    0 is no limit."""
    own_core: bool = False
    """The run has one core, and the strangers another, where there are two."""
    addresses: int = 200
    """Number of source addresses of the connections."""


@dataclass(frozen=True, kw_only=True)
class Withstood:
    """What a siege did to a run."""

    name: str
    what: str
    ended: bool
    """The run ended when its operator asked for it."""
    bits_equal: bool
    speed: float
    """Steps a second in a siege, over those of the calm times before and after it; the median round."""
    speeds: tuple[float, ...]
    """Of each round."""
    cpu: float
    """CPU seconds of the run's processes for a step, likewise."""
    reconnect_seconds: float | None
    """The longest that a new connection of a member took during the siege, with its handshake and, at the
    coordinator, an answer. None: one failed."""
    reconnects: int
    join_seconds: float | None
    """From the start of an honest node to its admission, during the siege; None: not within a minute."""
    asked_seconds: float
    """The longest of `ASKS` admissions from the request on, as a node asks once its process has started."""
    asked_again: int
    """How often one of these had to ask again; each has a token made a moment before."""
    reached: int
    """Connections or requests of the strangers."""
    memory_mb: tuple[float, ...]
    """The coordinator's resident memory at most, in MB: in the first calm time, then in each siege."""
    descriptors: int
    """The most that the coordinator had open at once in a siege."""
    line: str
    """How the run ended, if not well."""

    @property
    def good(self) -> bool:
        """The run ends as an undisturbed one, a member can connect and an honest node join meanwhile, and the
        coordinator's memory is bounded."""
        served = self.reconnect_seconds is not None and self.join_seconds is not None
        bounded = max(self.memory_mb) <= self.memory_mb[0] + MOST_GROWTH_MB
        return self.ended and self.bits_equal and served and bounded and not self.asked_again


SIEGES = (
    Siege(name="idle-join", what="hold idle connections to the coordinator's port", port="join", idle=1300),
    Siege(name="idle-link", what="hold idle connections to a node's link port", port="link", idle=1300),
    Siege(
        name="hostile",
        what="connect to the coordinator's one port and say nothing, garbage, a part of a hello, a byte a "
        "second, wrong names, another run's certificates, no HTTP, or calls that there are not",
        port="join",
        idle=1300,
        idle_a_second=50,
        kinds=tuple(KINDS),
    ),
    Siege(name="join-flood", what="ask to join with made-up tokens", port="join", joins_a_second=800),
)


ROUNDS = 5
"""Minutes of a siege at full size."""


def at_full_size(siege: Siege, rounds: int) -> Siege:
    """10,000 connections and 500 new ones a second, or the same flood, for `rounds` minutes in all.

    In turns with calm times, because a machine that does other work too has fast minutes and slow ones.
    """
    idle = {"idle": 10_000, "idle_a_second": 500} if siege.idle else {}
    times = {"seconds": 60.0, "rounds": rounds, "calm_seconds": 30.0}
    return replace(siege, **idle, **times, own_core=True, upload_mbit=0.0)


def _wrapper(core: int | None) -> tuple[str, ...]:
    """Starts a command with few descriptors, on one core; without a core `_few_descriptors` launches it."""
    if core is None:
        return ()
    return ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", "taskset", "-c", str(core))


def _few_descriptors(launch: Launch) -> Launch:
    """The same launch, of forked processes that have few descriptors."""

    def limited(command: Sequence[str], *, env: Mapping[str, str], **settings: Any) -> Child:
        return launch(command, env={**env, DESCRIPTORS_VARIABLE: str(DESCRIPTORS)}, **settings)

    return limited


def besiege(siege: Siege, directory: Path, *, launch: Launch) -> Withstood:
    """Run one siege, after which the operator ends the run.

    A spare connects again and again all the time, so that calm times have that cost, too. Another node joins
    during the first round and leaves. `launch` is that of a `Prefork`.
    """
    config = small(steps=MOST_STEPS, snapshot_every=SNAPSHOT_EVERY)
    config = replace(config, pipeline=replace(config.pipeline, stages=2))
    apart = siege.own_core and (os.cpu_count() or 1) > 1
    core = 0 if apart else None
    watch = SiegeWatch()
    members_launch = launch if apart else _few_descriptors(launch)
    with Run(directory, config, launch=members_launch, listener=watch.note) as run:
        coordinator = run.start(wrapper=_wrapper(core))
        paced = ("--max-bandwidth", str(siege.upload_mbit)) if siege.upload_mbit else ()
        for _ in range(2):
            run.add_node(options=paced, wrapper=_wrapper(core))
        coordinator.wait_step(WARM_STEPS)
        join_port = int(config.coordinator.listen.rpartition(":")[2])
        besieged = coordinator.wait_event(NodeJoined)
        link_port = int(besieged.address.rpartition(":")[2])
        port = link_port if siege.port == "link" else join_port
        token = JoinToken.parse(coordinator.token)
        members = list(run.processes)
        _join(run, _wrapper(core))
        spare = NodeIdentity.load(run.state_dir(2))
        assert spare is not None, "who has joined has an identity"
        joined, asked, again, reached = None, 0.0, 0, 0
        at = besieged if siege.port == "link" else None
        took: list[float] = []
        for number in range(siege.rounds):
            with watch.measure(members), _reconnecting(spare, join_port, at, []):
                _wait(siege.calm_seconds, coordinator)
            with _strangers(siege, port, token, core=1 if apart else None, launch=launch) as counted:
                if number == 0:
                    joined = _join(run, _wrapper(core), leaves=True)
                    asks = [_ask(run, one) for one in range(ASKS)]
                    asked, again = max(seconds for seconds, _ in asks), sum(more for _, more in asks)
                with watch.measure(members), _reconnecting(spare, join_port, at, took):
                    _wait(siege.seconds, coordinator)
            reached += counted[0]
        with watch.measure(members), _reconnecting(spare, join_port, at, []):
            _wait(siege.calm_seconds, coordinator)
        coordinator.interrupt()
        code: int | None = None
        with contextlib.suppress(StuckError):
            code = coordinator.wait_exit()
        done = len(run.losses)
        ended = done > 0 and code == INTERRUPTED
        expected = _undisturbed(run, done) if ended else None
        finished = coordinator.all(RunFinished)
        speeds, cpus = zip(*watch.ratios(), strict=True)
        return Withstood(
            name=siege.name,
            what=siege.what,
            ended=ended,
            bits_equal=expected is not None
            and run.losses == expected.losses
            and run.weights_sha256 == expected.weights_sha256,
            speed=round(median(speeds), 2),
            speeds=tuple(round(one, 2) for one in speeds),
            cpu=round(median(cpus), 2),
            reconnect_seconds=round(max(took), 2) if took and max(took) < RECONNECT_LIMIT else None,
            reconnects=len(took),
            join_seconds=joined,
            asked_seconds=round(asked, 2),
            asked_again=again,
            reached=reached,
            memory_mb=watch.memory_mb,
            descriptors=max(one.descriptors for one in watch.sieges),
            line="" if ended else finished[-1].reason if finished else "nothing happened any more",
        )


def _join(run: Run, wrapper: Sequence[str], *, leaves: bool = False) -> float | None:
    """Seconds from the start of a new node to its admission; None if that took too long."""
    started = time.monotonic()
    node = run.add_node(run.new_token(), wrapper=wrapper)
    try:
        node.wait_line(lambda line: "joined run" in line, JOIN_SECONDS)
    except StuckError:
        return None
    took = round(time.monotonic() - started, 2)
    if leaves:
        node.interrupt()
        node.wait_exit()
    return took


class _Asks(Patience):
    """No patience; counts how often it would be needed."""

    again = 0

    def shown(self, what: str) -> contextlib.AbstractAsyncContextManager[None]:
        self.again += what.endswith("asking again")
        return super().shown(what)


def _ask(run: Run, number: int) -> tuple[float, int]:
    """Seconds from a new node's first word to its admission, and how often it asked again; the node does not
    come."""
    token, directory = JoinToken.parse(run.new_token()), run.directory / f"asks-{number}"
    began = time.monotonic()
    asks = _Asks()
    asyncio.run(enrol(token, directory, Hardware(device="cpu", cores=1, memory_bytes=1 << 30), asks))
    return time.monotonic() - began, asks.again


def _undisturbed(run: Run, steps: int) -> Expected:
    """The first steps of an undisturbed run."""
    taken, weights = reference_run(run.config, steps)
    return Expected({number: step.loss for number, step in enumerate(taken, start=1)}, weights)


def _wait(seconds: float, coordinator: Coordinator) -> None:
    """Wait for so long, or for the run's end."""
    with contextlib.suppress(StuckError):
        coordinator.wait_exit(seconds)


# ---- a member that connects again


@contextlib.contextmanager
def _reconnecting(
    identity: NodeIdentity, port: int, neighbour: NodeJoined | None, took: list[float]
) -> Iterator[None]:
    """Connect again and again inside the block, at least once, as a member; adds each time to `took`."""
    over = threading.Event()

    def work() -> None:
        took.append(asyncio.run(_reconnect(identity, port, neighbour)))
        while not over.wait(RECONNECT_EVERY):
            took.append(asyncio.run(_reconnect(identity, port, neighbour)))

    thread = threading.Thread(target=work, name="reconnecting")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def _reconnect(identity: NodeIdentity, port: int, neighbour: NodeJoined | None) -> float:
    """Seconds until a new connection to the coordinator, or to a neighbour's link port, works; tried as nodes
    try."""
    if neighbour is None:
        address, name = f"127.0.0.1:{port}", identity.coordinator_name
    else:
        address, name = neighbour.address, identity.server_name(neighbour.node_id)
    began, backoff = time.monotonic(), Backoff(0.1, RECONNECT_SECONDS)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RECONNECT_LIMIT):
            while not await _served(address, name, identity, at_link=neighbour is not None):  # noqa: ASYNC110
                await asyncio.sleep(backoff.advance())
    return time.monotonic() - began


async def _served(address: str, name: str, identity: NodeIdentity, *, at_link: bool) -> bool:
    """Whether one new connection works: it is ready and, at the coordinator, a call is answered."""
    channel = open_channel(address, identity=identity, server_name=name)
    try:
        if at_link:
            await channel.channel_ready()
        else:
            probe = control_pb2_grpc.CoordinatorStub(channel).Probe(control_pb2.ProbeRequest(bytes=1))
            async for _ in probe:
                pass
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()
    return True


# ---- the strangers


@contextlib.contextmanager
def _strangers(
    siege: Siege, port: int, token: JoinToken, *, core: int | None, launch: Launch
) -> Iterator[list[int]]:
    """The siege goes on inside the block; gives a list that afterwards holds how many they were."""
    words = (json.dumps(asdict(siege)), str(port), token.encode())
    child = launch(
        [sys.executable, "-m", "tests.support.strangers", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path(), "GRPC_VERBOSITY": "ERROR"},
        start_new_session=True,
    )
    if core is not None:
        os.sched_setaffinity(child.pid, {core})
    reached = [0]
    assert child.stdin is not None and child.stdout is not None
    try:
        assert select.select([child.stdout], [], [], JOIN_SECONDS)[0], "the strangers did not come"
        assert child.stdout.readline() == "there\n", "the strangers are there"
        yield reached
        child.stdin.close()
        assert select.select([child.stdout], [], [], JOIN_SECONDS)[0], "the strangers did not go"
        reached[0] = int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def main() -> int:
    """Be the strangers until stdin closes: print "there" once the siege is on, and at the end how many."""
    siege, port, token = Siege(**json.loads(sys.argv[1])), int(sys.argv[2]), JoinToken.parse(sys.argv[3])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reached, over, there = [0], threading.Event(), threading.Event()

    def wait_end() -> None:
        there.wait()
        _say("there")
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_end, daemon=True).start()
    if siege.joins_a_second:
        asyncio.run(_ask_to_join(siege, port, token, reached, over, there))
    else:
        asyncio.run(_come(siege, port, token, reached, over, there))
    _say(str(reached[0]))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _come(
    siege: Siege,
    port: int,
    token: JoinToken,
    reached: list[int],
    over: threading.Event,
    there: threading.Event,
) -> None:
    """Open connections until `idle` were opened, 2,000 a second at most, and then `idle_a_second`."""
    crowd = Crowd(port, token.run_id, siege.kinds)
    open_ones: deque[asyncio.Task[None]] = deque()
    began, due = time.monotonic(), 0
    while not over.is_set():
        await asyncio.sleep(TICK_SECONDS)
        full = len(open_ones) >= siege.idle
        if full and not there.is_set():
            there.set()
            began, due = time.monotonic(), 0
        # By the clock: a tick that came late opens more.
        before, due = due, int((time.monotonic() - began) * (siege.idle_a_second if full else 2000))
        for _ in range(due - before):
            number = reached[0] % siege.addresses
            open_ones.append(crowd.open(f"127.1.{number // 250}.{1 + number % 250}"))
            reached[0] += 1
        while len(open_ones) > siege.idle:
            open_ones.popleft().cancel()
    for one in open_ones:
        one.cancel()


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


if __name__ == "__main__":
    sys.exit(main())
