"""The join port: TLS with only the coordinator's certificate, and one small method for anyone who
connects."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from node.coordinator.enrolment import EnrolmentHandler, KnownTokens
from node.coordinator.look_service import Looks
from wire.admission import Limits, address_group
from wire.descriptors import raise_limit
from wire.errors import RunError
from wire.front import Front, start_behind
from wire.identity.enrolment import Granted, Hardware, JoinRequest, Refusal
from wire.pacing import Pacer
from wire.v1 import enrolment_pb2 as pb

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 64 * 1024
REQUEST_SECONDS = 5.0
"""The seconds from the beginning of a call until its request has arrived. A connection has as long for its
handshake."""
IDLE_SECONDS = 30.0
MOST_SILENT = 256
"""The most calls without a request. Beyond it, the call that has been silent longest is ended."""
_MOST_AT_WORK = 4
_JOINS_A_SECOND, _JOINS_AT_ONCE = 20.0, 100.0
"""The rate and burst of requests from one address with one valid token, or without any."""
MOST_COUNTED = 4096
"""The most addresses whose requests are counted. Beyond it, the one least recently used is forgotten."""
CONNECTION_SECONDS = 30.0
"""The seconds after which a connection to the join port ends."""

BYTES_A_SECOND, BYTES_AT_ONCE = 8 * 1024, 16 * 1024
"""The rate and burst of bytes of a connection without a valid token, both directions together. A join takes
7,000. Beyond them nothing is read."""

Request = TypeVar("Request", pb.JoinRequest, pb.LookRequest)
Outcome = TypeVar("Outcome")
Context = grpc.aio.ServicerContext[Any, Any]

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # By default, a second process could listen on the same port and get half of the joins.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.server_handshake_timeout_ms", int(1000 * REQUEST_SECONDS)),
    ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
]


class RateLimit:
    """A bucket that holds `burst` permits and gains `rate` per second. Pure: the clock is an argument."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._permits = burst
        self._at: float | None = None

    def take(self, now: float, count: float = 1) -> bool:
        """Whether `count` permits are left at `now` (seconds on any clock). If so, take them."""
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._permits = min(self._burst, self._permits + elapsed * self._rate)
        if self._permits < count:
            return False
        self._permits -= count
        return True


class RateLimits:
    """One `RateLimit` per key: an address, or an address with a token."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._limits: dict[str, RateLimit] = {}

    def take(self, key: str, now: float) -> bool:
        """Whether one more request of `key` may be served at `now`."""
        limit = self._limits.pop(key, None) or RateLimit(self._rate, self._burst)
        self._limits[key] = limit
        if len(self._limits) > MOST_COUNTED:
            del self._limits[next(iter(self._limits))]
        return limit.take(now)


class _Silent:
    """Calls that wait for their requests, the oldest first."""

    def __init__(self) -> None:
        self._deadlines: dict[asyncio.Timeout, None] = {}

    async def first(self, requests: AsyncIterator[Request]) -> Request | None:
        """A call's request, if any. TimeoutError if it does not arrive in time, or too many calls wait."""
        if len(self._deadlines) >= MOST_SILENT:
            oldest = next(iter(self._deadlines))
            del self._deadlines[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(REQUEST_SECONDS) as deadline:
            self._deadlines[deadline] = None
            try:
                return await anext(requests, None)
            finally:
                self._deadlines.pop(deadline, None)


class EnrolmentService:
    """`thinwire.wire.v1.Enrolment` over an `EnrolmentHandler`.

    A refusal is an answer, not a gRPC error. RESOURCE_EXHAUSTED means "ask again later".
    """

    def __init__(self, handler: EnrolmentHandler, front: Front) -> None:
        self.control_port = 0
        """The port that admitted nodes use next, on the host that answered them; 0: the same port."""
        self._handler = handler
        self._front = front
        self._tokens = KnownTokens(handler.token_hashes)
        self._limits = RateLimits(_JOINS_A_SECOND, _JOINS_AT_ONCE)
        self._work = asyncio.Semaphore(_MOST_AT_WORK)
        self._silent = _Silent()
        self.looks = Looks(
            self._silent.first, self._refuse, handler.would_refuse, front.host, lambda: self.control_port
        )

    def handler(self) -> grpc.GenericRpcHandler:
        # A stream of requests, of which only the first counts. On the wire that equals a single request, but
        # its arrival can have a deadline, so that empty calls do not stay open forever.
        formats = pb.JoinRequest.FromString, pb.JoinReply.SerializeToString
        join = grpc.stream_unary_rpc_method_handler(self._join, *formats)
        withdraw = grpc.stream_unary_rpc_method_handler(self._withdraw, *formats)
        look = grpc.stream_stream_rpc_method_handler(
            self.looks.look, pb.LookRequest.FromString, pb.LookReply.SerializeToString
        )
        return grpc.method_handlers_generic_handler(
            "thinwire.wire.v1.Enrolment", {"Join": join, "Withdraw": withdraw, "Look": look}
        )

    async def _request(self, requests: AsyncIterator[pb.JoinRequest], context: Context) -> JoinRequest:
        """The request of a call. Without one, the call is ended."""
        try:
            message = await self._silent.first(requests)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no join request arrived")
        except DecodeError:
            message = None
        if message is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not a join request")
        hardware = message.hardware
        return JoinRequest(
            version=message.version,
            protocol=message.protocol,
            run_id=message.run_id,
            token_id=message.token_id,
            secret=message.secret,
            csr_der=message.csr_der,
            hardware=Hardware(
                device=hardware.device,
                cores=hardware.cores,
                memory_bytes=hardware.memory_bytes,
                devices=hardware.devices or 1,
                tensor_parallel=hardware.tensor_parallel or 1,
                host_bytes=hardware.host_bytes,
            ),
        )

    async def _join(self, requests: AsyncIterator[pb.JoinRequest], context: Context) -> pb.JoinReply:
        request, source = await self._request(requests, context), self._front.host(context.peer())
        outcome = await self._answer(request, context, self._handler.join)
        if isinstance(outcome, Granted):
            logger.info("admitted %s from %s by token %s", outcome.node_id, source, request.token_id)
            granted = pb.Granted(
                node_id=outcome.node_id,
                certificate_pem=outcome.certificate_pem,
                ca_pem=outcome.ca_pem,
                control_port=self.control_port,
            )
            return pb.JoinReply(granted=granted)
        # Do not log a stranger's text, which could forge lines.
        logger.info("refused a join request from %s: %s", source, outcome.code)
        return pb.JoinReply(refusal=pb.Refusal(code=outcome.code, message=outcome.message))

    async def _withdraw(self, requests: AsyncIterator[pb.JoinRequest], context: Context) -> pb.JoinReply:
        request = await self._request(requests, context)
        refusal = await self._answer(request, context, self._handler.withdraw)
        if refusal is None:
            return pb.JoinReply()
        return pb.JoinReply(refusal=pb.Refusal(code=refusal.code, message=refusal.message))

    async def _answer(
        self, request: JoinRequest, context: Context, decide: Callable[[JoinRequest], Outcome]
    ) -> Outcome | Refusal:
        """Answer the holder of a token with `decide`, on a thread. The call is ended if this address asks too
        often."""
        try:
            refusal = await self._refuse(request, context.peer())
            if refusal is not None:
                return refusal
            async with self._work:
                return await asyncio.to_thread(decide, request)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many join requests: ask again later")
        except RunError as error:
            source = self._front.host(context.peer())
            logger.error("a join request from %s could not be served: %s", source, error)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot use its database")

    async def _refuse(self, request: JoinRequest, peer: str) -> Refusal | None:
        """Why the gRPC peer does not hold a token. Raises TimeoutError if it must ask later, RunError.

        Strangers count by address, and only once it is known that they hold no token. So they cannot shut out
        a holder behind the same address, not even of a token that was just created. Until then they cost a
        comparison of hashes and a wait for a database read that all share. Holders count by token and
        address, so one that floods shuts out no other.
        """
        address = address_group(self._front.host(peer))
        refusal = self._handler.refuse_cheaply(request)
        if refusal is None and not await self._tokens.look_up(request.token_id, request.secret):
            refusal = self._handler.unknown_token()
        source = address if refusal is not None else f"{request.token_id} {address}"
        if not self._limits.take(source, time.monotonic()):
            raise TimeoutError
        if refusal is not None:
            return refusal
        self._front.unpace(peer)
        return None


class JoinPort:
    """The server of joins. Its front listens, or gets connections from a `Door`."""

    def __init__(self, handler: EnrolmentHandler) -> None:
        self.front = Front(
            Limits.of_strangers(raise_limit(), CONNECTION_SECONDS),
            pacer=lambda: Pacer(BYTES_A_SECOND, ahead=BYTES_AT_ONCE / BYTES_A_SECOND),
        )
        self.service = EnrolmentService(handler, self.front)
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers([self.service.handler()])

    async def start(self, credentials: tuple[bytes, bytes]) -> None:
        """Serve the connections that the front accepts.

        Args:
            credentials: (key PEM, certificate PEM) of `CertificateAuthority.coordinator_credentials`.
        """
        await start_behind(self.front, self._server, grpc.ssl_server_credentials([credentials]))

    async def stop(self, grace: float | None) -> None:
        """Stop serving. Running calls have `grace` seconds to end."""
        await self._server.stop(grace)
        await self.front.close()
