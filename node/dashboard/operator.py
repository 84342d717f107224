"""Handles changes to a run from its page: who may make them, and what they do.

Reading needs no login. A change needs the operator's key, a private connection, and a header that a form on
another site cannot send. The rate of changes is limited. Wrong keys count only against their own address, and
the right key always works.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from node.coordinator.changes import Changes
from node.coordinator.enrolment_service import RateLimit, RateLimits
from node.coordinator.store import Store
from node.telemetry import events
from node.telemetry.format import parse_duration
from wire.admission import address_group
from wire.errors import UserError
from wire.identity.files import create_private
from wire.identity.token import LONGEST_TTL, MOST_USES

KEY_FILE = "operator.key"
KEY_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
KEY_LENGTH = 26
"""Gives 128 bits with an alphabet of 31 characters that are hard to confuse."""
HEADER = "X-Thinwire"
"""A header with any value. Other sites cannot send it without a CORS preflight, which is refused."""
FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")
"""Headers that proxies set. A loopback connection with one of them comes from another machine."""


class OperatorKey:
    """The secret that changes need. Only its hash is kept in memory."""

    def __init__(self, text: str) -> None:
        self._hash = _hash(text)

    @classmethod
    def load_or_create(cls, run_dir: Path) -> "OperatorKey":
        """The key in `run_dir`/operator.key (mode 0600), created if missing. Raises UserError if unusable."""
        path = run_dir / KEY_FILE
        fresh = "".join(secrets.choice(KEY_ALPHABET) for _ in range(KEY_LENGTH))
        try:
            held = create_private(path, fresh.encode() + b"\n").decode("ascii").strip()
        except UnicodeDecodeError:
            held = ""
        except OSError as error:
            raise UserError(f"{path} cannot be used: {error.strerror}") from None
        if len(held) < KEY_LENGTH:
            raise UserError(f"{path} is damaged: delete it, and the next start creates a new key")
        return cls(held)

    def matches(self, text: str) -> bool:
        """Compare in constant time, ignoring case and white space."""
        return hmac.compare_digest(_hash(text), self._hash)


@dataclass(frozen=True, kw_only=True)
class ChangeRequest:
    """The properties of a request to change the run."""

    remote: str
    """The client's address, without port."""
    secure: bool
    """Whether it arrived over TLS."""
    host: str
    """The Host header."""
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Denied:
    """A refusal: HTTP status and one line."""

    status: int
    reason: str
    is_guess: bool = False
    """Whether a wrong key was given. There are at most a few such refusals per minute and address."""


class ChangeGuard:
    """Admits or refuses changes, and counts wrong keys by client address."""

    WRONG_KEYS = 5
    """The most wrong keys from one address at once and per `SECONDS`. More are delayed and not logged."""
    CHANGES = 30
    """The most changes from all addresses at once and per `SECONDS`."""
    SECONDS = 60.0

    def __init__(self, key: OperatorKey) -> None:
        self._key = key
        self._wrong = RateLimits(self.WRONG_KEYS / self.SECONDS, self.WRONG_KEYS)
        self._changes = RateLimit(self.CHANGES / self.SECONDS, self.CHANGES)

    def check(self, request: ChangeRequest, now: float) -> Denied | None:
        """The refusal of a change, or None if it is admitted. `now` is monotonic seconds."""
        if (denied := connection_denied(request)) is not None:
            return denied
        headers = {name.lower(): value for name, value in request.headers.items()}
        if HEADER.lower() not in headers:
            return Denied(status=403, reason=f"the header {HEADER} is missing")
        origin = headers.get("origin")
        if origin is not None and origin.split("://", 1)[-1] != request.host:
            return Denied(status=403, reason="pages of other sites may not change this run")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            return Denied(
                status=401, reason=f"enter the operator's key; it is in {KEY_FILE} in the run's directory"
            )
        if not self._key.matches(given):
            # Others' guesses never block the right key, because clients share an address behind a proxy and
            # on loopback. 128 bits cannot be guessed at any rate.
            if not self._wrong.take(address_group(request.remote), now):
                return Denied(status=429, reason="too many wrong keys from this address: wait a minute")
            return Denied(
                status=401,
                reason=f"that is not the operator's key; it is in {KEY_FILE} in the run's directory",
                is_guess=True,
            )
        if not self._changes.take(now):
            return Denied(status=429, reason="too many changes within a minute: wait a moment")
        return None


def connection_denied(request: ChangeRequest) -> Denied | None:
    """Why the key must not be sent over this connection, or None."""
    forwarded = any(name.lower() in {key.lower() for key in request.headers} for name in FORWARDED)
    if request.secure or (is_loopback(request.remote) and not forwarded):
        return None
    return Denied(
        status=403,
        reason="this connection is not encrypted, so do not send the key over it: open the page with "
        "https:// (at its own port it needs dashboard.tls = true), or connect through "
        "`ssh -L 7700:127.0.0.1:PORT` to the coordinator's machine",
    )


def is_loopback(address: str) -> bool:
    """Whether an IP address is a loopback address, or the name is `localhost`."""
    if address.lower() == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def host_name(host: str) -> str:
    """A Host header without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _hash(text: str) -> bytes:
    # Header bytes that are not UTF-8 arrive as surrogates, which must not raise.
    plain = "".join(text.split()).lower().encode(errors="surrogatepass")
    return hashlib.sha256(plain).digest()


ACTIONS = ("snapshot", "stop", "set", "evict", "token", "revoke", "tokens")


class Controls(Protocol):
    """The part of `node.coordinator.coordinator.Coordinator` that the page uses."""

    def stop(self, reason: str) -> None: ...

    def save(self) -> None: ...

    @property
    def changes(self) -> Changes: ...


class Operator:
    """Carries out changes that `ChangeGuard` has admitted. Each also exists as a command."""

    def __init__(self, controls: Controls, store: Store, emit: Callable[[events.Event], None]) -> None:
        self._controls = controls
        self._store = store
        self._emit = emit

    async def act(
        self, action: str, subject: str, *, keep_token: bool = False, uses: int = 1, ttl: str = "24h"
    ) -> Mapping[str, Any]:
        """Carry out an action. Returns `text`, which says what was done, or for `tokens` their list. `token`
        adds `join_line` with the new token's secret, which is shown and stored nowhere else.

        Args:
            action: one of `ACTIONS`.
            subject: a node id for `evict`, a token id for `revoke`, `section.key=value`s for `set`.
            keep_token: whether `evict` keeps the remaining uses of the node's token.
            uses: how many nodes a new `token` may admit.
            ttl: how long a new `token` is valid, such as `24h`.

        Raises UserError if it cannot be done.
        """
        match action:
            case "snapshot":
                self._controls.save()
                return self._done("a snapshot is taken after this step")
            case "stop":
                self._controls.stop("stopped by the operator")
                return self._done("the run stops after a snapshot; `thinwire resume` continues it")
            case "set":
                if not (overrides := subject.split()):
                    raise UserError("enter what to change, such as pipeline.backward_codec=fixed-6")
                return self._done(self._controls.changes.ask(overrides))
            case "evict":
                evict = partial(self._store.evict, subject, time.time(), keep_token=keep_token)
                if (eviction := await asyncio.to_thread(evict)) is None:
                    raise UserError(f"{subject[:40]} is not a member of this run")
                return self._done(str(eviction))
            case "token":
                seconds = parse_duration(ttl) or 0.0
                if not (1 <= uses <= MOST_USES and 0 < seconds <= LONGEST_TTL.total_seconds()):
                    raise UserError(
                        f"a token admits 1 to {MOST_USES:,} nodes for at most {LONGEST_TTL.days}d, "
                        f"got {uses} and {ttl[:40]!r}"
                    )
                create = partial(self._store.create_token, time.time(), timedelta(seconds=seconds), uses)
                record, token = await asyncio.to_thread(create)
                admits = f"token {record.token_id} admits {uses} node{'s' * (uses > 1)} within {ttl}"
                return {**self._done(admits), "join_line": f"thinwire join {token.encode()}"}
            case "revoke":
                if not await asyncio.to_thread(self._store.revoke_token, subject):
                    raise UserError(f"there is no token {subject[:40]}")
                return self._done(f"token {subject} is revoked; nodes that it admitted stay")
            case "tokens":
                return {"tokens": await asyncio.to_thread(self._tokens)}
            case _:
                raise UserError(f"unknown action {action[:40]!r}; known: {', '.join(ACTIONS)}")

    def _done(self, text: str) -> Mapping[str, str]:
        self._emit(events.Notice(text=f"from the page: {text}"))
        return {"text": text}

    def _tokens(self) -> list[dict[str, Any]]:
        """The tokens without their secrets, of which only hashes are stored."""
        now = time.time()
        return [
            {
                "id": record.token_id,
                "uses": record.uses,
                "uses_allowed": record.uses_allowed,
                "expires": datetime.fromtimestamp(record.expires, UTC).isoformat(timespec="minutes"),
                "state": record.state(now),
                "usable": record.state(now) == "usable",
            }
            for record in self._store.list_tokens()
        ]
