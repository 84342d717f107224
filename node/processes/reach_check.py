"""`thinwire doctor TOKEN`: which paths lead from this machine to others of the run, and how fast its line is.

The coordinator answers the holder of a token (`node.coordinator.look_service`), which uses up nothing. To
find out what a NAT does, this machine connects from one port to several machines, each of which returns the
address that it sees (`wire.mirror`).
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import torch
from cryptography import x509

from node.config.schema import PLANNED, TrainingSection
from node.processes.doctor import CONTACT_SECONDS, Check, Status, fail, ok, warn
from node.processes.enrol import authorities
from node.processes.look import SeenThere, look
from node.run_file.validate import COMPUTES, PRECISIONS
from node.stage.machine_info import cannot_compute
from node.telemetry.format import mbit_text, printable
from wire import event_loop
from wire.dialing import Place, connect, proxy_for
from wire.errors import LinkError, ThinwireError, TokenError
from wire.identity.names import join_address, split_address
from wire.identity.token import JoinToken
from wire.interfaces import ipv6_addresses
from wire.mirror import seen_as
from wire.port_mapping import MappedPort, routers_to_ask

RELAY_SECONDS = 3.0
LITTLE_MBIT = 2.0
"""The Mbit/s below which most runs wait for this machine's line."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One connection: this machine's end, and that end as the other machine sees it."""

    target: str
    """The other machine, host:port."""
    here: tuple[str, int]
    there: tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Findings(SeenThere):
    """The results, before they are put into words."""

    proxy: str = ""
    """host:port of the proxy through which everything goes."""
    seen: tuple[Seen, ...] = ()
    """Connections from one port."""
    mapped_port: int = 0
    """The router's port that leads here."""
    mapped_by: str = ""
    not_mapped: str = ""
    """Why the router forwards no port to this machine."""
    near: tuple[tuple[str, float], ...] = ()
    """Volunteers that relay and answer, with their round trips in seconds."""
    round_trip: float = 0.0
    """The seconds to the coordinator and back."""
    six: str = ""
    """This machine's own IPv6 address."""
    members: str = ""
    """The coordinator's host:port for admitted nodes, if it differs from the one for joining."""
    members_answer: bool = True
    """Whether `members` accepts connections from this machine."""


def check_reach(text: str, device: torch.device) -> Iterator[Check]:
    """Check the paths from this machine, and whether `device` can compute in the run. No checks without a
    coordinator, which `doctor.check_token` reports.

    `text` is a token or a join line. Takes some seconds.
    """
    try:
        token = JoinToken.parse((text.split() or [""])[-1])
        findings = event_loop.run(_find_by(token))
    except TokenError:
        return
    except ThinwireError as error:
        fix = "try again; if it happens again, ask the run's operator"
        yield warn("paths", printable(str(error)), fix)
        return
    if findings is not None:
        yield from judged(findings)
        yield from judge_precision(findings.precision, findings.compute, device)


async def _find_by(token: JoinToken) -> Findings | None:
    """The findings from the first of the token's addresses that is the coordinator's; None if none is."""

    async with contextlib.aclosing(authorities(token)) as answers:
        async for address, authority in answers:
            if not isinstance(authority, ThinwireError):
                return await find(token, address, authority)
    return None


# ---- in words


def judged(findings: Findings) -> Iterator[Check]:
    """Yield the findings as checks. Pure."""
    if findings.refusal:
        yield fail("token", printable(findings.refusal), "ask for a new token")
    if findings.members:
        yield _members(findings)
    yield ok("nat", nat_words(findings))
    yield _direct(findings)
    yield ok("simultaneous open", _together_words(findings))
    yield _relay(findings)
    yield _line(findings)
    if findings.links:
        yield ok("links", printable("; ".join(findings.links)))


def judge_precision(precision: str, compute: str, device: torch.device) -> Iterator[Check]:
    """Whether a device supports a run's precision, as reported by the coordinator."""
    if precision not in PRECISIONS or compute not in COMPUTES:
        yield fail(
            "precision",
            printable(f"the coordinator says that the run computes in {precision!r}, {compute!r}")[:200],
            "this version does not know that: use the version of thinwire that the coordinator runs",
        )
        return
    training = TrainingSection(precision=precision, compute=compute)
    if line := cannot_compute(training, device):
        detail, _, fix = line.partition(": ")
        yield fail("precision", detail, fix)
        return
    words = f"the run computes in {precision}" + (", with products in FP8" if compute == "fp8" else "")
    if precision == PLANNED:
        words = "the run computes in a precision that all its machines support when it starts"
    yield ok("precision", printable(f"{words}; {device} can"))


def _members(findings: Findings) -> Check:
    name = printable(f"coordinator {findings.members}")
    if findings.members_answer:
        return ok(name, "answers; nodes go there once they are admitted")
    return fail(
        name,
        "nothing answers, and nodes go there once they are admitted: a join would wait for it",
        "open this port too, or ask the run's operator for coordinator.one_port = true",
    )


def nat_words(findings: Findings) -> str:
    six = (
        f"; also has {findings.six}, which no NAT changes"
        if findings.six and ":" not in findings.host
        else ""
    )
    if findings.proxy:
        return f"everything goes through the proxy {findings.proxy}, behind which nothing can be dialled"
    if not findings.seen:
        return f"others see {findings.host}; nobody could be asked what a NAT does with ports{six}"
    first = findings.seen[0]
    if first.here[0] == first.there[0]:
        return f"none: others see this machine's own address {first.here[0]}{six}"
    outside = {seen.there[1] for seen in findings.seen}
    targets = len(findings.seen)
    if len({seen.there[0] for seen in findings.seen}) > 1:
        return f"NAT with several addresses, {', '.join(sorted({s.there[0] for s in findings.seen}))}{six}"
    where = f"NAT at {first.there[0]}"
    if len(outside) > 1:
        return f"{where} with another port for each target (symmetric){six}"
    if targets > 1:
        return f"{where} that maps a port in the same way for every target ({targets} were asked){six}"
    if first.there[1] == first.here[1]:
        kept = "it keeps ports, as a NAT does that maps them in the same way for every target"
        return f"{where}; {kept}, but only one could be asked{six}"
    return f"{where} that changes ports; only one target could be asked, so perhaps for each target{six}"


def _direct(findings: Findings) -> Check:
    if findings.mapped_reached:
        port = f"port {findings.mapped_port} of its router ({findings.mapped_by})"
        how = f"others can dial this machine at {port}"
    elif findings.reached:
        how = "others can dial this machine"
    else:
        if findings.mapped_port:
            promise = f"the router promised its port {findings.mapped_port} ({findings.mapped_by})"
            why = f"{promise}, but it does not lead here"
        elif findings.not_mapped:
            why = f"its router forwards no port ({findings.not_mapped})"
        else:
            why = "none of its ports answers the coordinator"
        how = f"only with nodes that can be dialled: this machine cannot, because {why}"
    return ok("direct path", printable(how))


def _together_words(findings: Findings) -> str:
    if findings.proxy:
        return "not through a proxy"
    if not findings.seen:
        return "unknown"
    if findings.seen[0].here[0] == findings.seen[0].there[0]:
        return "works with nodes whose NAT keeps or maps ports in the same way for every target"
    outside = {seen.there for seen in findings.seen}
    if len(outside) > 1:
        return "does not work: this NAT uses another port for each target"
    if len(findings.seen) > 1 or findings.seen[0].here[1] == findings.seen[0].there[1]:
        ports = {seen.target.rpartition(":")[2] for seen in findings.seen}
        more = f", if the network lets out more than port {min(ports)}" if len(ports) == 1 else ""
        return f"likely works with nodes that have a NAT like this one{more}"
    return "unknown"


def _relay(findings: Findings) -> Check:
    parts = []
    if findings.relayed:
        parts.append(f"the coordinator relays, {1000 * findings.round_trip:.0f} ms away")
    if findings.near:
        nearest = min(seconds for _, seconds in findings.near)
        count = len(findings.near)
        who = "one volunteer relays" if count == 1 else f"{count} volunteers relay"
        parts.append(f"{who}, {'' if count == 1 else 'the nearest '}{1000 * nearest:.0f} ms away")
    if parts:
        return ok("relay", printable("; ".join(parts)))
    alone = not (findings.reached or findings.mapped_reached)
    return Check(
        name="relay",
        status=Status.FAIL if alone else Status.OK,
        detail="no node relays in this run" + (", and others cannot dial this machine" if alone else ""),
        fix="let the router forward a TCP port and join with --listen and --advertise HOST:PORT, or ask "
        "the run's operator for coordinator.relay = true"
        if alone
        else "",
    )


def _line(findings: Findings) -> Check:
    down, up = 8e-6 * findings.down, 8e-6 * findings.up
    slow = min(down, up) < LITTLE_MBIT
    return Check(
        name="line",
        status=Status.WARN if slow else Status.OK,
        detail=f"{mbit_text(down)} down and {mbit_text(up)} up, to and from the coordinator, "
        f"{1000 * findings.round_trip:.0f} ms away",
        fix="a slow line may make the whole run wait: close other programs that use it" if slow else "",
    )


# ---- finding out


async def find(token: JoinToken, address: str, authority: x509.Certificate) -> Findings:
    """Ask the coordinator at `address`, and nodes that relay. Raises LinkError.

    Listens meanwhile and, if the router can, has it forward a port here for that time.
    """
    proxy = proxy_for(address)
    began = time.monotonic()
    try:
        (await connect(address)).close()
    except OSError as error:
        raise LinkError(f"nothing answers at {address} ({error.strerror or error})") from None
    round_trip = time.monotonic() - began
    async with _listening() as port:
        mapped = MappedPort(await routers_to_ask("0.0.0.0:0", address), lambda text: None)
        try:
            await mapped.open(port)
            seen = await look(token, address, authority, port, mapped.outside)
        finally:
            why_not, by, outside = mapped.why_not, mapped.by, mapped.outside
            await mapped.close()
    mirrors = () if proxy is not None else (*token.addresses, *seen.relays)
    members = join_address(split_address(address)[0], seen.control_port) if seen.control_port else ""
    return Findings(
        **vars(seen),
        proxy=proxy.shown if proxy is not None else "",
        seen=await _through_the_nat(address, mirrors),
        mapped_port=outside,
        mapped_by=by,
        not_mapped="" if why_not == "not asked" else why_not,
        near=await _nearness(seen.relays),
        round_trip=round_trip,
        six=next(iter(ipv6_addresses()), ""),
        members=members,
        members_answer=not members or await _answers(members),
    )


@contextlib.asynccontextmanager
async def _listening() -> AsyncIterator[int]:
    """Listen on a port, on all addresses of this machine. It accepts connections and closes them."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    try:
        listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        listener = socket.create_server(("0.0.0.0", 0))
    async with await asyncio.start_server(accept, sock=listener) as server:
        yield int(server.sockets[0].getsockname()[1])


async def _through_the_nat(address: str, mirrors: tuple[str, ...]) -> tuple[Seen, ...]:
    """Connect from one port to as many of these machines as answer, the one at `address` first."""
    seen: list[Seen] = []
    own: tuple[str, int] | None = None
    hosts: set[str] = set()
    for target in dict.fromkeys((address, *mirrors)):
        for place in await _places(target):
            host = str(place[1][0])
            if host in hosts or (seen and (":" in host) != (":" in seen[0].here[0])):
                continue
            try:
                own_end, there = await seen_as(place, own or ("::" if ":" in host else "0.0.0.0", 0))
            except LinkError:
                continue
            hosts.add(host)
            own = own_end
            seen.append(Seen(target=target, here=own_end, there=there))
            break
    return tuple(seen)


async def _places(address: str) -> list[Place]:
    """The addresses, IPv4 first, because NATs change it."""
    try:
        host, port = split_address(address)
        places = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    return sorted(((int(family), place[:2]) for family, _, _, _, place in places), key=lambda place: place[0])


async def _answers(address: str) -> bool:
    """Whether the address accepts connections."""
    try:
        async with asyncio.timeout(CONTACT_SECONDS):
            (await connect(address)).close()
    except (OSError, ValueError):  # ValueError for an invalid port
        return False
    return True


async def _nearness(relays: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """The relays that answer, and the seconds that a connection to each takes."""

    async def measure(address: str) -> tuple[str, float] | None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(RELAY_SECONDS):
                (await connect(address)).close()
        except (OSError, ThinwireError):
            return None
        return address, time.monotonic() - began

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(measure(address)) for address in relays]
    return tuple(near for task in tasks if (near := task.result()) is not None)
