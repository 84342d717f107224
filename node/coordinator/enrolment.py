"""Decides who gets a certificate, at the join port and at renewal. It does no networking.

The calls block (on a database transaction or a signature), so use `asyncio.to_thread`.
"""

import asyncio
import contextlib
import hmac
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta

from node.coordinator.store import EVICTED_WORDS, Member, Store
from node.telemetry import events, points
from wire.errors import RefusalCode, RunError
from wire.identity.authority import CertificateAuthority, csr_public_key, public_key_hash
from wire.identity.enrolment import Granted, Hardware, JoinRequest, Refusal
from wire.identity.names import node_id_of
from wire.identity.token import TokenRecord, admit, hash_secret
from wire.messages import Hello
from wire.version import PROTOCOL, VERSION

_LONGEST_DEVICE_NAME = 100
_LARGEST_INTEGER = 2**63 - 1


class EnrolmentHandler:
    """Admits nodes by token, and renews the certificates of admitted nodes.

    Args:
        lifetime: the lifetime of a node's certificate.
        clock: returns Unix seconds.
        useless: why the run cannot use this hardware, or nothing. The token then stays unused.
    """

    def __init__(
        self,
        store: Store,
        authority: CertificateAuthority,
        lifetime: timedelta,
        clock: Callable[[], float],
        useless: Callable[[Hardware], str | None] = lambda _: None,
    ) -> None:
        self._store = store
        self._authority = authority
        self._lifetime = lifetime
        self._clock = clock
        self._useless = useless

    def refuse_cheaply(self, request: JoinRequest) -> Refusal | None:
        """Refuse a request from another version or run, without database or cryptography."""
        # The version first, because other fields may have another meaning in other versions.
        if (refusal := version_refusal(request)) is not None:
            return refusal
        if request.run_id != self._authority.run_id:
            return Refusal(
                RefusalCode.WRONG_RUN,
                f"this coordinator serves run {self._authority.run_id} and the join token is for "
                f"{request.run_id[:40]!r}: ask for a token of this run",
            )
        return None

    def unknown_token(self) -> Refusal:
        """The answer to an unknown token id or a wrong secret."""
        refusal = admit(None, b"", b"", self._clock()).refusal
        assert refusal is not None, "without a record, no node is admitted"
        return refusal

    def would_refuse(self, token_id: str, secret: bytes) -> str:
        """Why this token would not admit a new node; empty if it would."""
        record = next((token for token in self._store.list_tokens() if token.token_id == token_id), None)
        refusal = admit(record, secret, b"", self._clock()).refusal
        return "" if refusal is None else refusal.message

    def token_hashes(self) -> dict[str, bytes]:
        """SHA-256 of the secret of every token, by token id."""
        return {record.token_id: record.secret_hash for record in self._store.list_tokens()}

    def join(self, request: JoinRequest) -> Granted | Refusal:
        """Decide on a node's request. A refused request changes neither tokens nor members.

        Grants are in the database before the reply. If the reply is lost, the same request gets a new
        certificate for the same node without another use of the token.
        """
        if (refusal := self.refuse_cheaply(request)) is not None:
            return refusal
        if (refusal := _refuse_hardware(request.hardware)) is not None:
            return refusal
        try:
            key = csr_public_key(request.csr_der)
        except ValueError as error:
            return _bad_csr(error)
        now = self._clock()
        key_hash = public_key_hash(key)
        member = Member(node_id_of(key_hash), key_hash, request.hardware, joined=now)
        # Only for holders of a token, because checking whether this machine can host a stage takes a while. A
        # node that returns with a used token is told after its hello.
        invited = not self.would_refuse(request.token_id, request.secret)
        line = self._useless(request.hardware) if invited else None
        useless = None if line is None else Refusal(RefusalCode.BAD_REQUEST, line)
        # Before the use is recorded, so that a failure costs none.
        certificate = self._authority.issue_node(key, member.node_id, self._lifetime, now) if invited else b""
        decision = self._store.admit_token(request.token_id, request.secret, member, useless)
        if decision.refusal is not None:
            return decision.refusal
        points.reach(points.Phase.ENROLMENT, at=points.At.COORDINATOR)
        certificate = certificate or self._authority.issue_node(key, member.node_id, self._lifetime, now)
        return Granted(member.node_id, certificate, self._authority.certificate_pem)

    def withdraw(self, request: JoinRequest) -> Refusal | None:
        """Give back the use of a node that cannot use its grant. Returns None if that is done.

        The request's key proves who owns the use. A node that has connected has spent it.
        """
        if (refusal := self.refuse_cheaply(request)) is not None:
            return refusal
        try:
            key_hash = public_key_hash(csr_public_key(request.csr_der))
        except ValueError as error:
            return _bad_csr(error)
        if self._store.withdraw(request.token_id, key_hash):
            return None
        return Refusal(RefusalCode.BAD_REQUEST, "this key has no unspent use of the token to give back")

    def renew(self, node_id: str, csr_der: bytes) -> bytes | Refusal:
        """A new certificate (PEM) for a member that proved its id with the present one.

        The key must be the one with which it joined; with another key, it must join again.
        """
        try:
            key = csr_public_key(csr_der)
        except ValueError as error:
            return _bad_csr(error)
        member = self._store.member(node_id)
        if member is None:
            return Refusal(RefusalCode.NOT_A_MEMBER, f"{node_id} is not a member: join it with a token")
        if member.evicted is not None:
            return Refusal(RefusalCode.EVICTED, f"{node_id} was {EVICTED_WORDS}")
        if public_key_hash(key) != member.public_key_hash:
            return Refusal(
                RefusalCode.BAD_REQUEST, f"{node_id} joined with another key than this request's: join again"
            )
        return self._authority.issue_node(key, node_id, self._lifetime, self._clock())


class KnownTokens:
    """The run's tokens in memory, so that a request without a valid one costs no database call.

    Other processes create tokens too. So an unknown id is looked up in the database, but all unknown ids
    within `READ_SECONDS` share one read.
    """

    READ_SECONDS = 0.25

    def __init__(self, read: Callable[[], dict[str, bytes]]) -> None:
        """`read` returns secret hashes by token id. It blocks, so it runs on a thread."""
        self._read = read
        self._hashes: dict[str, bytes] = {}
        self._began = -math.inf
        self._reading: asyncio.Task[None] | None = None

    def holds(self, token_id: str, secret: bytes) -> bool:
        known = self._hashes.get(token_id, bytes(32))
        return hmac.compare_digest(hash_secret(secret), known) and token_id in self._hashes

    async def look_up(self, token_id: str, secret: bytes) -> bool:
        """`holds`, after a read that began after this call if the id is unknown. Raises RunError."""
        asked = time.monotonic()
        while token_id not in self._hashes and self._began < asked:
            if self._reading is None:
                self._reading = asyncio.get_running_loop().create_task(self._read_again())
            await asyncio.shield(self._reading)
        return self.holds(token_id, secret)

    async def _read_again(self) -> None:
        try:
            await asyncio.sleep(self._began + self.READ_SECONDS - time.monotonic())
            began = time.monotonic()
            self._hashes = await asyncio.to_thread(self._read)
            self._began = began
        finally:
            self._reading = None


def version_refusal(request: JoinRequest | Hello) -> Refusal | None:
    """Why a node of another version may not take part, if it may not."""
    if (request.version, request.protocol) == (VERSION, PROTOCOL):
        return None
    return Refusal(
        RefusalCode.VERSION_MISMATCH,
        f"the coordinator runs thinwire {VERSION} (protocol {PROTOCOL}) and this node "
        f"{request.version[:40]!r} (protocol {request.protocol}): install thinwire {VERSION}",
    )


def _refuse_hardware(hardware: Hardware) -> Refusal | None:
    """Why this hardware cannot be recorded, if it cannot. It goes into the database and to terminals."""
    if len(hardware.device) > _LONGEST_DEVICE_NAME or not hardware.device.isprintable():
        return Refusal(
            RefusalCode.BAD_REQUEST,
            f"the device name must be at most {_LONGEST_DEVICE_NAME} printable characters: correct it",
        )
    sizes = hardware.cores, hardware.memory_bytes, hardware.host_bytes
    if not all(0 <= size <= _LARGEST_INTEGER for size in sizes):
        return Refusal(RefusalCode.BAD_REQUEST, "cores and memory bytes must fit in 63 bits: correct them")
    if hardware.tensor_parallel < 1 or hardware.devices < 1 or hardware.devices % hardware.tensor_parallel:
        return Refusal(
            RefusalCode.BAD_REQUEST,
            f"{hardware.devices} devices cannot be rows of {hardware.tensor_parallel}: correct them",
        )
    return None


def _bad_csr(error: ValueError) -> Refusal:
    reason = str(error).splitlines()[0] if str(error) else "unreadable"
    return Refusal(RefusalCode.BAD_REQUEST, f"the certificate request is unusable ({reason}): send a new one")


INTERVAL_SECONDS = 5.0


def uses_left(records: Iterable[TokenRecord], now: float) -> int:
    """The uses left of all valid tokens at the Unix time `now`."""
    return sum(record.uses_allowed - record.uses for record in records if record.state(now) == "usable")


@asynccontextmanager
async def token_uses_told(
    store: Store,
    emit: Callable[[events.Event], None],
    *,
    interval: float = INTERVAL_SECONDS,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[None]:
    """Inside the block, `emit` gets a `TokenUses` at once, then one within `interval` of each change."""

    async def watch() -> None:
        emitted = None
        while True:
            # A failed read is repeated later; other users of the database report the error.
            with contextlib.suppress(RunError):
                left = uses_left(await asyncio.to_thread(store.list_tokens), clock())
                if left != emitted:
                    emitted = left
                    emit(events.TokenUses(left=left))
            await asyncio.sleep(interval)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
