"""Who may change a run through its page. Pure, but for the key's file.

Looking needs no login. A change needs the operator's key, a connection that nobody can listen to, a header
that a form on another site cannot send, and comes at a bounded rate.
"""

import hashlib
import hmac
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wire.errors import UserError
from wire.identity.files import create_private

KEY_FILE = "operator.key"
KEY_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
KEY_LENGTH = 26
"""Of 31 characters that are hard to mistake for one another: 128 bits."""
HEADER = "X-Thinwire"
"""Any value. A page of another site cannot send it without asking first, and is refused then."""
FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")
"""Set by proxies: a loopback connection that has one of these began on another machine."""


class OperatorKey:
    """The secret that a change needs."""

    def __init__(self, text: str) -> None:
        self._hash = _hash(text)

    @classmethod
    def load_or_create(cls, run_dir: Path) -> "OperatorKey":
        """The key in `run_dir`/operator.key (mode 0600); made when there is none. UserError if unusable."""
        path = run_dir / KEY_FILE
        fresh = "".join(secrets.choice(KEY_ALPHABET) for _ in range(KEY_LENGTH))
        try:
            held = create_private(path, fresh.encode() + b"\n").decode("ascii").strip()
        except UnicodeDecodeError:
            held = ""
        except OSError as error:
            raise UserError(f"{path} cannot be used: {error.strerror}") from None
        if len(held) < KEY_LENGTH:
            raise UserError(f"{path} is damaged: delete it, and the next start makes a new key")
        return cls(held)

    def matches(self, text: str) -> bool:
        """In the same time whatever `text` is; case and blanks do not count."""
        return hmac.compare_digest(_hash(text), self._hash)


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What is known of a request that wants to change the run."""

    remote: str
    """The address that it came from, without port."""
    secure: bool
    """Whether it came over TLS."""
    host: str
    """Its Host header."""
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Denied:
    """Why not: an HTTP status, and one line."""

    status: int
    reason: str


class Gate:
    """Lets a change pass or not. Attempts with a wrong key are counted by the address they come from."""

    WRONG_KEYS = 5
    """Wrong keys from one address in `SECONDS`; more are not even compared."""
    CHANGES = 30
    """Changes in `SECONDS`, from everywhere together."""
    SECONDS = 60.0

    def __init__(self, key: OperatorKey) -> None:
        self._key = key
        self._wrong = Limiter(most=self.WRONG_KEYS, seconds=self.SECONDS)
        self._changes = Limiter(most=self.CHANGES, seconds=self.SECONDS)

    def check(self, asking: Asking, now: float) -> Denied | None:
        """None if the change may be made. `now` is seconds of any clock that never goes back."""
        if (denied := connection_denied(asking)) is not None:
            return denied
        headers = {name.lower(): value for name, value in asking.headers.items()}
        if HEADER.lower() not in headers:
            return Denied(status=403, reason=f"the header {HEADER} is missing")
        origin = headers.get("origin")
        if origin is not None and origin.split("://", 1)[-1] != asking.host:
            return Denied(status=403, reason="another site's page may not change this run")
        if self._wrong.full(asking.remote, now):
            return Denied(status=429, reason="too many wrong keys from this address: wait a minute")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            return Denied(
                status=401, reason=f"type the operator's key: it is in {KEY_FILE} of the run's directory"
            )
        if not self._key.matches(given):
            self._wrong.count(asking.remote, now)
            return Denied(
                status=401,
                reason=f"that is not the operator's key; it is in {KEY_FILE} of the run's directory",
            )
        if self._changes.full("", now):
            return Denied(status=429, reason="too many changes within a minute: wait a little")
        self._changes.count("", now)
        return None


def connection_denied(asking: Asking) -> Denied | None:
    """Why the connection itself is not fit for the key, if it is not."""
    forwarded = any(name.lower() in {key.lower() for key in asking.headers} for name in FORWARDED)
    if asking.secure or (is_loopback(asking.remote) and not forwarded):
        return None
    return Denied(
        status=403,
        reason="this connection can be listened to, so the key must not cross it: set dashboard.tls = true, "
        "or come through `ssh -L 7702:127.0.0.1:PORT` to the coordinator's machine",
    )


def is_loopback(address: str) -> bool:
    """Whether an IP address, or the name `localhost`, is this machine's own."""
    if address == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


class Limiter:
    """Counts by name within a sliding time; remembers so many names and no more."""

    MOST_NAMES = 1024

    def __init__(self, *, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._times: OrderedDict[str, list[float]] = OrderedDict()

    def full(self, name: str, now: float) -> bool:
        return len(self._recent(name, now)) >= self._most

    def count(self, name: str, now: float) -> None:
        self._times[name] = [*self._recent(name, now), now]
        self._times.move_to_end(name)
        while len(self._times) > self.MOST_NAMES:
            self._times.popitem(last=False)

    def _recent(self, name: str, now: float) -> list[float]:
        return [at for at in self._times.get(name, ()) if now - at < self._seconds]


def _hash(text: str) -> bytes:
    # Bytes of a header that are no UTF-8 are surrogates in `text`: no key has them, and they must not raise.
    plain = "".join(text.split()).lower().encode(errors="surrogatepass")
    return hashlib.sha256(plain).digest()
