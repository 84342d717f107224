"""Joining a run over real sockets and TLS on loopback: what is granted and refused, and what it changes."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec

import node.processes.enrol as enrol_module
from node.coordinator import enrolment_service
from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.enrolment_service import RateLimits
from node.coordinator.store import Member, Store
from node.processes.enrol import enrol
from node.processes.patience import Patience
from tests.support.join_port import open_join_port
from tests.support.ports import free_port
from wire.errors import LinkError, RefusalCode, Refused, RunError, TokenError, UserError
from wire.identity.authority import CertificateAuthority, key_to_pem, public_key_hash
from wire.identity.credentials import (
    NodeIdentity,
    load_key,
    load_or_create_key,
    make_csr,
    server_name_options,
)
from wire.identity.enrolment import Granted, Hardware, JoinRequest, Refusal
from wire.identity.names import node_id_of
from wire.identity.token import CLAIM_SECONDS, JoinToken, base58_encode
from wire.v1 import enrolment_pb2
from wire.version import PROTOCOL, VERSION

HARDWARE = Hardware("cpu", 2, 2**33)
DAY = timedelta(hours=24)
CONTROL_PORT = 7701


class Clock:
    """Unix time that a test can move."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@dataclass
class Coordinator:
    """A running join port, its handler and its database."""

    store: Store
    authority: CertificateAuthority
    handler: EnrolmentHandler
    clock: Clock
    port: int

    def token(self, uses: int = 1) -> JoinToken:
        return self.store.create_token(self.clock(), DAY, uses)[1]

    def trace(self) -> object:
        """Everything in the database that joining can change."""
        return self.store.list_tokens(), self.store.members()


class LossyHandler(EnrolmentHandler):
    """Decides and records as usual, but loses the first `lost` replies."""

    lost = 0

    def join(self, request: JoinRequest) -> Granted | Refusal:
        outcome = super().join(request)
        if self.lost:
            self.lost -= 1
            raise RunError("the test loses this reply")
        return outcome


Start = Callable[[str], Awaitable[Coordinator]]


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    running: list[tuple[grpc.aio.Server, Store]] = []

    async def start_one(run_id: str) -> Coordinator:
        clock = Clock()
        authority = CertificateAuthority.create(run_id, clock())
        store = Store.create(
            tmp_path / run_id, run_id=run_id, config_json="{}", pin=authority.pin, now=clock()
        )
        handler = LossyHandler(store, authority, DAY, clock)
        credentials = authority.coordinator_credentials(DAY, clock())
        server, port = await open_join_port(handler, "127.0.0.1:0", credentials, CONTROL_PORT)
        running.append((server, store))
        store.set_addresses([f"127.0.0.1:{port}"])
        return Coordinator(store, authority, handler, clock, port)

    yield start_one
    for server, store in running:
        await server.stop(None)
        store.close()


@pytest_asyncio.fixture
async def coordinator(start: Start) -> Coordinator:
    return await start("run-a")


# ---- joining


async def test_a_token_becomes_an_identity(coordinator: Coordinator, tmp_path: Path) -> None:
    token = coordinator.token()
    identity, control_address = await enrol(JoinToken.parse(token.encode()), tmp_path / "node", HARDWARE)
    assert control_address == f"127.0.0.1:{CONTROL_PORT}"
    assert (identity.run_id, identity.pin) == ("run-a", coordinator.authority.pin)
    (member,) = coordinator.store.members()
    assert (member.node_id, member.hardware) == (identity.node_id, HARDWARE)
    assert coordinator.store.list_tokens()[0].uses == 1
    assert NodeIdentity.load(tmp_path / "node") == identity


async def test_rejoining_uses_no_token(coordinator: Coordinator, tmp_path: Path) -> None:
    token = coordinator.token()
    first = await enrol(token, tmp_path / "node", HARDWARE)
    coordinator.store.revoke_token(token.token_id)
    assert await enrol(token, tmp_path / "node", HARDWARE) == first
    assert await enrol(coordinator.token(), tmp_path / "node", HARDWARE) == first
    assert [record.uses for record in coordinator.store.list_tokens()] == [1, 0]


async def test_without_patience_a_silent_address_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrol_module, "_CONNECT_SECONDS", 1.0)
    asked: list[object] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        token = JoinToken((address,), "demo-x", b"p" * 32, "A" * 8, b"s" * 16)
        with pytest.raises(LinkError):
            await enrol(token, tmp_path / "node", HARDWARE, Patience())
    assert len(asked) == 1


async def test_a_moved_coordinator_is_asked_again(start: Start, tmp_path: Path) -> None:
    coordinator = await start("run-a")
    token = coordinator.token()
    first, _ = await enrol(token, tmp_path / "node", HARDWARE)
    credentials = coordinator.authority.coordinator_credentials(DAY, time.time())
    server, port = await open_join_port(coordinator.handler, "127.0.0.1:0", credentials, 9999)
    try:
        moved = replace(token, addresses=(f"127.0.0.1:{port}",))
        again, control_address = await enrol(moved, tmp_path / "node", HARDWARE)
        assert (again.node_id, control_address) == (first.node_id, "127.0.0.1:9999")
        assert coordinator.store.list_tokens()[0].uses == 1
    finally:
        await server.stop(None)


async def test_an_ended_certificate_needs_a_token_and_keeps_the_name(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    coordinator.handler._lifetime = timedelta(minutes=1)
    first, _ = await enrol(coordinator.token(), tmp_path / "node", HARDWARE)
    coordinator.handler._lifetime = DAY
    again, _ = await enrol(coordinator.token(), tmp_path / "node", HARDWARE)
    assert again.node_id == first.node_id and again.expires_at > first.expires_at + 80000
    assert len(coordinator.store.members()) == 1


async def test_who_was_off_until_its_token_expired_rejoins_by_it(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    now, store = time.time(), coordinator.store
    _, token = store.create_token(now - 3600, timedelta(minutes=30), 1)
    key = load_key(load_or_create_key(tmp_path / "node"))
    key_hash = public_key_hash(key.public_key())
    joined = Member(node_id_of(key_hash), key_hash, HARDWARE, joined=now - 3000)
    assert store.admit_token(token.token_id, token.secret, joined).refusal is None
    again, _ = await enrol(token, tmp_path / "node", HARDWARE)
    assert again.node_id == joined.node_id and store.list_tokens()[0].uses == 1
    with pytest.raises(Refused, match="has expired"):
        await enrol(token, tmp_path / "another", HARDWARE)
    store.evict(joined.node_id, now)
    (tmp_path / "node" / "identity.json").unlink()
    with pytest.raises(Refused, match="was evicted"):
        await enrol(token, tmp_path / "node", HARDWARE)


@pytest.mark.parametrize(("hours", "line"), [(3, "3.0 hours behind"), (-6, "6.0 hours ahead of")])
async def test_a_wrong_clock_is_named_even_if_the_coordinators_certificate_is_valid(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int, line: str
) -> None:
    monkeypatch.setattr(enrol_module, "_ROUNDS", (0.0,))
    coordinator.clock.ahead = 3600.0 * hours
    token = coordinator.token()
    before = coordinator.trace()
    with pytest.raises(LinkError, match=f"clock is {line} the coordinator's"):
        await enrol(token, tmp_path / "node", HARDWARE)
    assert NodeIdentity.load(tmp_path / "node") is None
    assert coordinator.trace() == before, "the use is another node's"
    coordinator.clock.ahead = 0.0
    identity, _ = await enrol(token, tmp_path / "other", HARDWARE)
    assert [member.node_id for member in coordinator.store.members()] == [identity.node_id]


async def test_a_disk_that_keeps_no_identity_spends_no_use(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = coordinator.token()
    before = coordinator.trace()

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(enrol_module, "write_private", full)
        with pytest.raises(UserError, match="No space left on device"):
            await enrol(token, tmp_path / "node", HARDWARE)
    assert coordinator.trace() == before


async def test_who_has_come_has_spent_the_use(coordinator: Coordinator, tmp_path: Path) -> None:
    """A use whose node never came goes to one other node a minute later; that of a node that came to none."""
    token = coordinator.token()
    lost, _ = await enrol(token, tmp_path / "lost", HARDWARE)
    with pytest.raises(Refused, match="try again in a minute"):
        await enrol(token, tmp_path / "node", HARDWARE)
    coordinator.clock.ahead = CLAIM_SECONDS
    taken = await asyncio.gather(
        *(enrol(token, tmp_path / f"node{number}", HARDWARE) for number in range(3)), return_exceptions=True
    )
    (granted,) = (one for one in taken if not isinstance(one, BaseException))
    assert [member.node_id for member in coordinator.store.members()] == [granted[0].node_id]
    assert granted[0].node_id != lost.node_id and coordinator.store.list_tokens()[0].uses == 1
    coordinator.store.claim([granted[0].node_id])
    coordinator.clock.ahead = 2 * CLAIM_SECONDS
    key_hash = coordinator.store.members()[0].public_key_hash
    assert not coordinator.store.withdraw(token.token_id, key_hash)
    with pytest.raises(Refused) as refused:
        await enrol(token, tmp_path / "late", HARDWARE)
    assert refused.value.code is RefusalCode.TOKEN_USED_UP


async def test_lost_replies_do_not_burn_the_use(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the node asks again or is started again."""
    assert isinstance(coordinator.handler, LossyHandler)
    coordinator.handler.lost, token = 3, coordinator.token()
    monkeypatch.setattr(enrol_module, "_ROUNDS", (0.0,))
    with pytest.raises(LinkError, match="did not answer"):
        await enrol(token, tmp_path / "node", HARDWARE)
    monkeypatch.setattr(enrol_module, "_ROUNDS", (0.0, 0.0, 0.0))
    identity, _ = await enrol(token, tmp_path / "node", HARDWARE)
    assert coordinator.handler.lost == 0
    assert [member.node_id for member in coordinator.store.members()] == [identity.node_id]
    assert coordinator.store.list_tokens()[0].uses == 1


async def test_the_first_address_that_answers_is_used(coordinator: Coordinator, tmp_path: Path) -> None:
    addresses = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{coordinator.port}")
    token = replace(coordinator.token(), addresses=addresses)
    _, control_address = await enrol(token, tmp_path / "node", HARDWARE)
    assert control_address == f"127.0.0.1:{CONTROL_PORT}"


# ---- refusals


@pytest.mark.parametrize(
    ("case", "code", "line"),
    [
        ("used up", RefusalCode.TOKEN_USED_UP, "1 of 1"),
        ("other version", RefusalCode.VERSION_MISMATCH, f"install thinwire {VERSION}"),
        ("tampered request", RefusalCode.BAD_REQUEST, "own key"),
        ("device name", RefusalCode.BAD_REQUEST, "printable characters"),
        ("huge memory", RefusalCode.BAD_REQUEST, "63 bits"),
    ],
)
async def test_a_refusal_is_one_clear_line_and_leaves_no_trace(
    coordinator: Coordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    code: RefusalCode,
    line: str,
) -> None:
    token, hardware = coordinator.token(), HARDWARE
    if case == "used up":
        await enrol(token, tmp_path / "earlier", HARDWARE)
    elif case == "other version":
        monkeypatch.setattr(enrol_module, "VERSION", "9.9.9")
    elif case == "tampered request":
        monkeypatch.setattr(enrol_module, "make_csr", tampered_csr)
    elif case == "device name":
        hardware = replace(HARDWARE, device="\x1b[2Jowned")
    elif case == "huge memory":
        hardware = replace(HARDWARE, memory_bytes=2**64 - 1)
    before = coordinator.trace()
    with pytest.raises(Refused) as caught:
        await enrol(token, tmp_path / "node", hardware)
    assert caught.value.code is code
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert coordinator.trace() == before
    assert NodeIdentity.load(tmp_path / "node") is None


def tampered_csr(key_pem: bytes) -> bytes:
    """A request for this key with its signature's last byte changed."""
    csr = make_csr(key_pem)
    return csr[:-1] + bytes([csr[-1] ^ 1])


def test_the_handler_refuses_what_a_correct_node_never_sends(tmp_path: Path) -> None:
    authority = CertificateAuthority.create("run-a", time.time())
    key_pem = key_to_pem(ec.generate_private_key(ec.SECP256R1()))
    request = JoinRequest(VERSION, PROTOCOL, "run-a", "zzzzzzzz", bytes(16), make_csr(key_pem), HARDWARE)
    with Store.create(tmp_path, run_id="run-a", config_json="{}", pin=authority.pin, now=0.0) as store:
        handler = EnrolmentHandler(store, authority, DAY, time.time)
        for change, code in (
            ({"run_id": "run-b"}, RefusalCode.WRONG_RUN),
            ({"protocol": PROTOCOL + 1, "run_id": "run-b"}, RefusalCode.VERSION_MISMATCH),
            ({"version": ""}, RefusalCode.VERSION_MISMATCH),
            ({"csr_der": b""}, RefusalCode.BAD_REQUEST),
            ({"csr_der": request.csr_der.replace(b"\2\1\0", b"\2\1\5", 1)}, RefusalCode.BAD_REQUEST),
            ({"secret": b""}, RefusalCode.TOKEN_UNKNOWN),
        ):
            outcome = handler.join(replace(request, **change))
            assert isinstance(outcome, Refusal) and outcome.code is code
            assert "\n" not in outcome.message
        assert store.members() == []


def test_an_unfit_node_with_a_good_token_gets_the_reason(tmp_path: Path) -> None:
    """Its token stays unused, and the reply reveals nothing about the model to strangers, for whom nothing is
    estimated."""
    judged: list[Hardware] = []

    def useless(hardware: Hardware) -> str:
        judged.append(hardware)
        return "needs 9 GB"

    authority = CertificateAuthority.create("run-a", time.time())
    csr = make_csr(key_to_pem(ec.generate_private_key(ec.SECP256R1())))
    with Store.create(tmp_path, run_id="run-a", config_json="{}", pin=authority.pin, now=0.0) as store:
        store.set_addresses(["127.0.0.1:7700"])
        record, token = store.create_token(time.time(), DAY, 1)
        handler = EnrolmentHandler(store, authority, DAY, time.time, useless)
        request = JoinRequest(VERSION, PROTOCOL, "run-a", record.token_id, token.secret, csr, HARDWARE)
        assert handler.join(request) == Refusal(RefusalCode.BAD_REQUEST, "needs 9 GB")
        stranger = handler.join(replace(request, secret=bytes(16)))
        assert isinstance(stranger, Refusal) and stranger.code is RefusalCode.TOKEN_UNKNOWN
        assert "9 GB" not in stranger.message and judged == [HARDWARE]
        assert [token.uses for token in store.list_tokens()] == [0]
        assert store.members() == []
        # As little is used up where no certificate can be made.
        broken = EnrolmentHandler(store, authority, timedelta(days=10**7), time.time)
        with pytest.raises(OverflowError):
            broken.join(request)
        assert [token.uses for token in store.list_tokens()] == [0] and store.members() == []


async def test_another_runs_coordinator_does_not_get_the_secret(start: Start, tmp_path: Path) -> None:
    ours, theirs = await start("run-a"), await start("run-b")
    token = replace(ours.token(), addresses=(f"127.0.0.1:{theirs.port}",))
    with pytest.raises(TokenError, match="run-b"):
        await enrol(token, tmp_path / "node", HARDWARE)
    assert theirs.trace() == ([], []) and ours.store.members() == []
    with pytest.raises(TokenError, match=r"run-a.* run-x"):
        await enrol(replace(ours.token(), run_id="run-x"), tmp_path / "x", HARDWARE)
    with pytest.raises(TokenError, match=r"run-b .*; .* run-b "):
        both = (f"127.0.0.1:{theirs.port}", f"localhost:{theirs.port}")
        await enrol(replace(token, addresses=both), tmp_path / "node", HARDWARE)


async def test_a_directory_belongs_to_one_run(start: Start, tmp_path: Path) -> None:
    ours, theirs = await start("run-a"), await start("run-b")
    identity, _ = await enrol(ours.token(), tmp_path / "node", HARDWARE)
    with pytest.raises(UserError, match=r"run-a .*run-b"):
        await enrol(theirs.token(), tmp_path / "node", HARDWARE)
    assert NodeIdentity.load(tmp_path / "node") == identity
    with pytest.raises(UserError, match="Not a directory"):
        await enrol(ours.token(), tmp_path / "node" / "identity.json", HARDWARE)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="dangling"):
        await enrol(ours.token(), tmp_path / "dangling", HARDWARE)
    assert len(ours.store.members()) == 1 and theirs.store.members() == []


async def test_an_evicted_node_is_refused_everywhere(coordinator: Coordinator, tmp_path: Path) -> None:
    identity, _ = await enrol(coordinator.token(), tmp_path / "node", HARDWARE)
    coordinator.store.evict(identity.node_id, time.time())
    (tmp_path / "node" / "identity.json").unlink()
    with pytest.raises(Refused, match="evicted"):
        await enrol(coordinator.token(), tmp_path / "node", HARDWARE)
    outcome = coordinator.handler.renew(identity.node_id, identity.csr_der())
    assert isinstance(outcome, Refusal) and outcome.code is RefusalCode.EVICTED


async def test_too_many_requests_are_turned_away(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrol_module, "_ROUNDS", (0.0,))
    monkeypatch.setattr(enrolment_service.RateLimit, "take", lambda *_: False)
    with pytest.raises(LinkError, match="RESOURCE_EXHAUSTED"):
        await enrol(coordinator.token(), tmp_path / "node", HARDWARE)
    assert coordinator.store.members() == []


def _fifty_a_source() -> Callable[[RateLimits, str, float], bool]:
    asked: Counter[str] = Counter()

    def take(limits: RateLimits, key: str, now: float) -> bool:
        asked[key] += 1
        return asked[key] <= 50

    return take


async def test_strangers_with_made_up_tokens_shut_out_no_holder_behind_their_address(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrol_module, "_ROUNDS", (0.0,))
    monkeypatch.setattr(enrolment_service.RateLimits, "take", _fifty_a_source())
    monkeypatch.setattr(enrolment_service, "BYTES_A_SECOND", 1e6)
    admitted: list[JoinRequest] = []
    admit = EnrolmentHandler.join

    def noted(handler: EnrolmentHandler, request: JoinRequest) -> Granted | Refusal:
        admitted.append(request)
        return admit(handler, request)

    monkeypatch.setattr(EnrolmentHandler, "join", noted)
    codes: list[grpc.StatusCode] = []
    async with asyncio.timeout(60), joining(coordinator) as channel:
        call: Any = channel.unary_unary(
            "/thinwire.wire.v1.Enrolment/Join",
            request_serializer=enrolment_pb2.JoinRequest.SerializeToString,
            response_deserializer=enrolment_pb2.JoinReply.FromString,
        )
        request = enrolment_pb2.JoinRequest(
            version=VERSION, protocol=PROTOCOL, run_id="run-a", token_id="zzzzzzzz", secret=bytes(16)
        )

        async def flood() -> None:
            while True:
                try:
                    reply = await call(request)
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code())
                    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                        exhausted.set()
                else:
                    assert reply.refusal.code == RefusalCode.TOKEN_UNKNOWN.value
                    codes.append(grpc.StatusCode.OK)

        exhausted = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            strangers = [group.create_task(flood()) for _ in range(8)]
            await exhausted.wait()
            # Nobody has asked with these tokens yet. One attempt each: `_ROUNDS`.
            identities = [
                (await enrol(coordinator.token(), tmp_path / f"node-{number}", HARDWARE))[0]
                for number in range(6)
            ]
            for stranger in strangers:
                stranger.cancel()
    expected = {identity.node_id for identity in identities}
    assert {member.node_id for member in coordinator.store.members()} == expected and len(expected) == 6
    assert len(admitted) == 6, "no stranger costs a transaction or a signature"
    assert codes.count(grpc.StatusCode.OK) <= 50 < len(codes)


async def test_a_long_message_is_turned_away(coordinator: Coordinator, tmp_path: Path) -> None:
    before = coordinator.trace()
    options = server_name_options("coordinator.run-a")
    credentials = grpc.ssl_channel_credentials(coordinator.authority.certificate_pem)
    async with grpc.aio.secure_channel(f"127.0.0.1:{coordinator.port}", credentials, options) as channel:
        call: Any = channel.unary_unary("/thinwire.wire.v1.Enrolment/Join")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(65 * 1024), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert coordinator.trace() == before


def joining(coordinator: Coordinator) -> grpc.aio.Channel:
    """A stranger's connection of its own to the join port."""
    options = (*server_name_options("coordinator.run-a"), ("grpc.use_local_subchannel_pool", 1))
    credentials = grpc.ssl_channel_credentials(coordinator.authority.certificate_pem)
    return grpc.aio.secure_channel(f"127.0.0.1:{coordinator.port}", credentials, options)


async def test_idle_calls_keep_nobody_out(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrol_module, "_ROUNDS", (0.0,))
    monkeypatch.setattr(enrolment_service, "REQUEST_SECONDS", 3600.0)
    monkeypatch.setattr(enrolment_service, "MOST_SILENT", 31)
    channels = [joining(coordinator) for _ in range(4)]
    calls: list[Any] = [
        channel.stream_unary("/thinwire.wire.v1.Enrolment/Join")() for channel in channels for _ in range(8)
    ]
    # One too many: when the one that has waited longest ends, all are there.
    ends = [asyncio.ensure_future(call.code()) for call in calls]
    ended, _ = await asyncio.wait(ends, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert [end.result() for end in ended] == [grpc.StatusCode.DEADLINE_EXCEEDED]
    identity, _ = await enrol(coordinator.token(), tmp_path / "node", HARDWARE)
    assert [member.node_id for member in coordinator.store.members()] == [identity.node_id]
    assert sum(call.done() for call in calls) <= 2
    for channel in channels:
        await channel.close()
    await asyncio.gather(*ends)


async def test_a_request_comes_in_time_or_the_call_ends(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = coordinator.trace()
    async with asyncio.timeout(60), joining(coordinator) as channel:
        path = "/thinwire.wire.v1.Enrolment/Join"
        empty: Any = channel.stream_unary(path)()
        await empty.done_writing()
        assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT
        junk: Any = channel.unary_unary(path)(b"\xff" * 40)
        assert await junk.code() is grpc.StatusCode.INVALID_ARGUMENT
        monkeypatch.setattr(enrolment_service, "REQUEST_SECONDS", 0.05)
        silent: Any = channel.stream_unary(path)()
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await silent.details() == "no join request arrived"
    assert coordinator.trace() == before


def test_the_rate_limit_refills() -> None:
    limit = enrolment_service.RateLimit(rate=2.0, burst=3.0)
    assert [limit.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not limit.take(10.4) and limit.take(10.5) and not limit.take(10.5)
    assert not limit.take(5.0), "a clock that steps back earns nothing"
    assert [limit.take(100.0) for _ in range(4)] == [True, True, True, False]


async def test_secrets_stay_out_of_logs_and_files(
    coordinator: Coordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token, refused = coordinator.token(), coordinator.token()
    coordinator.store.revoke_token(refused.token_id)
    identity, _ = await enrol(token, tmp_path / "node", HARDWARE)
    with pytest.raises(Refused) as caught:
        await enrol(refused, tmp_path / "other", HARDWARE)
    assert identity.node_id in caplog.text and "token-revoked" in caplog.text
    files = [file for folder in ("run-a", "node", "other") for file in (tmp_path / folder).iterdir()]
    content = b"".join(file.read_bytes() for file in files)
    text = f"{caplog.text} {caught.value!r} {token!r} {identity!r}"
    for secret in (token.secret, refused.secret):
        for form in (secret.hex(), base58_encode(secret), repr(secret)[2:-1]):
            assert form not in text and form.encode() not in content
        assert secret not in content
    assert "PRIVATE KEY" not in text
