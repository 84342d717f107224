"""The join token: its text form, and the rules for admitting it.

    tw1_<body>_<token id>_<secret>_<checksum>

Body and secret are base58, the id is 8 base58 letters, the checksum is the CRC-32 of all before it in 8 hex
digits: a double click selects all of it, and a truncated paste is caught offline. The body is: run
id (length byte, UTF-8), CA pin (32 bytes), number of addresses (byte), each address (length byte, UTF-8).

The rules (`admit`) are pure: they take a record and a time. The coordinator's database applies them.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from zlib import crc32

from wire.errors import RefusalCode, TokenError, shortened
from wire.identity.enrolment import Refusal
from wire.identity.names import is_run_id, split_address

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PREFIX = "tw1"
_ID_LETTERS = 8
_SECRET_BYTES = 16
_PIN_BYTES = 32
MAX_ADDRESSES = 255
MAX_ADDRESS_BYTES = 255
"""The number and each length are a byte."""
MAX_ADDRESSES_BYTES = 2800
"""All addresses together, each with its length byte; keeps the whole token below `_LONGEST`."""
MOST_USES = 1_000_000
LONGEST_TTL = timedelta(days=366)
"""A token that an operator makes is good for this long at most."""
# Decoding base58 takes quadratic time; no real token is near this long.
_LONGEST = 4096


def token_in(text: str) -> str:
    """The token in a pasted join line, or the last word; a mailer may have wrapped the token over lines."""
    words = text.split()
    first = next((i for i, word in enumerate(words) if word.startswith(f"{_PREFIX}_")), len(words) - 1)
    return "".join(words[max(0, first) :])


def base58_encode(data: bytes) -> str:
    """Bitcoin's base58: big-endian, a `1` for each leading zero byte."""
    number, digits = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


def base58_decode(text: str) -> bytes:
    """The inverse of `base58_encode`; ValueError for a letter outside the alphabet."""
    number = 0
    for letter in text:
        number = number * 58 + _BASE58.index(letter)
    return b"\0" * (len(text) - len(text.lstrip("1"))) + number.to_bytes((number.bit_length() + 7) // 8)


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Everything a volunteer's machine needs to ask for a certificate in one run."""

    addresses: tuple[str, ...]
    """The coordinator's join port as host:port, tried in this order."""
    run_id: str
    pin: bytes
    """SHA-256 of the run's CA's SubjectPublicKeyInfo, 32 bytes."""
    token_id: str
    secret: bytes = field(repr=False)
    """16 random bytes. The coordinator keeps only their hash."""

    def __post_init__(self) -> None:
        for address in self.addresses:
            split_address(address)
        if not (
            1 <= len(self.addresses) <= MAX_ADDRESSES
            and all(len(address.encode()) <= MAX_ADDRESS_BYTES for address in self.addresses)
            and sum(1 + len(address.encode()) for address in self.addresses) <= MAX_ADDRESSES_BYTES
            and is_run_id(self.run_id)
            and len(self.pin) == _PIN_BYTES
            and len(self.token_id) == _ID_LETTERS
            and set(self.token_id) <= set(_BASE58)
            and len(self.secret) == _SECRET_BYTES
        ):
            raise ValueError("a join token needs addresses, a run id, a 32-byte pin, an id and a secret")

    def encode(self) -> str:
        """The text a volunteer pastes. It contains the secret: show it once, never log it."""
        run_id = self.run_id.encode()
        body = bytes([len(run_id)]) + run_id + self.pin + bytes([len(self.addresses)])
        for address in self.addresses:
            packed = address.encode()
            body += bytes([len(packed)]) + packed
        text = f"{_PREFIX}_{base58_encode(body)}_{self.token_id}_{base58_encode(self.secret)}"
        return f"{text}_{crc32(text.encode()):08x}"

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """Read a pasted token. White space anywhere is dropped: a terminal may have wrapped the line.

        Raises TokenError, which never repeats the token.
        """
        text = "".join(text.split())
        prefix, _, rest = text.partition("_")
        if prefix != _PREFIX:
            if prefix.startswith("tw") and prefix[2:].isdigit():
                raise TokenError(
                    f"this join token is of format {shortened(prefix)!r}, and this thinwire reads "
                    f"{_PREFIX!r}: "
                    "install the version of thinwire that the coordinator runs"
                )
            raise TokenError(f"this is not a join token: expected {_PREFIX}_..., copy the join line again")
        parts = rest.split("_")
        if len(parts) < 4 or len(parts[-1]) < 8:
            raise TokenError("the join token is cut short: copy the whole join line again")
        signed, _, checksum = text.rpartition("_")
        sound = text.isascii() and len(text) <= _LONGEST and checksum == f"{crc32(signed.encode()):08x}"
        if not sound:
            raise TokenError("the join token is mistyped (its checksum is wrong): copy the join line again")
        try:
            body, token_id, secret, _ = parts
            return cls(*_unpack(base58_decode(body)), token_id, base58_decode(secret))
        except ValueError:
            malformed = "the join token is malformed though its checksum is right: ask for a new one"
            raise TokenError(malformed) from None


def _unpack(body: bytes) -> tuple[tuple[str, ...], str, bytes]:
    """(addresses, run id, pin) of a token's body; ValueError when it is not exactly those."""
    position = 0

    def take(length: int) -> bytes:
        nonlocal position
        position += length
        if position > len(body):
            raise ValueError("a part reaches past the end")
        return body[position - length : position]

    run_id = take(take(1)[0]).decode()
    pin = take(_PIN_BYTES)
    addresses = tuple(take(take(1)[0]).decode() for _ in range(take(1)[0]))
    if position != len(body):
        raise ValueError("something follows the last address")
    return addresses, run_id, pin


def hash_secret(secret: bytes) -> bytes:
    """The form of a secret that the coordinator stores: SHA-256 is enough for 128 random bits."""
    return hashlib.sha256(secret).digest()


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The coordinator's record of a token. Times are Unix seconds."""

    token_id: str
    secret_hash: bytes = field(repr=False)
    created: float
    expires: float
    uses_allowed: int
    revoked: bool = False
    bound: frozenset[bytes] = frozenset()
    """Public keys (SHA-256 of their SPKI) admitted with this token."""
    unclaimed: Mapping[bytes, float] = field(default_factory=dict, compare=False)
    """Those keys whose nodes have not come yet, and when they were admitted."""
    closed: bool = False
    """No further keys are admitted, since a node that it admitted was evicted; the others may come back."""

    @property
    def uses(self) -> int:
        """Admitted keys; asking again is no further use."""
        return len(self.bound)

    def state(self, now: float) -> str:
        """`usable` at Unix time `now`, or why no further key is admitted."""
        if self.revoked:
            return "revoked"
        if self.closed:
            return "closed"
        if now >= self.expires:
            return "expired"
        return "used up" if self.uses >= self.uses_allowed else "usable"

    def bind(self, public_key_hash: bytes) -> "TokenRecord":
        """The record after admitting this key."""
        return replace(self, bound=self.bound | {public_key_hash})


@dataclass(frozen=True, slots=True)
class Decision:
    """`refusal` is None if the key is admitted; with `new_use` it must first be bound to the token."""

    refusal: Refusal | None = None
    new_use: bool = False
    in_place_of: bytes | None = None
    """The key that loses its use to this one: its node never came."""


CLAIM_SECONDS = 60.0
"""The seconds for an admitted node to come. After that, its use of the token may go to another node."""


def admit(record: TokenRecord | None, secret: bytes, public_key_hash: bytes, now: float) -> Decision:
    """Whether a token admits a key at Unix time `now`. `record` is None for an unknown id.

    Idempotent on (token, key): a node whose reply was lost asks again without another use. A key that was
    admitted before is admitted after the token has expired, so a node that was off past its certificate needs
    no new token. When no other use is left, that of a node that did not come within `CLAIM_SECONDS`
    goes to the next one who asks.

    A wrong secret gets the same answer as an unknown id, so ids cannot be probed.
    """
    expected = record.secret_hash if record else bytes(32)
    if not hmac.compare_digest(hash_secret(secret), expected) or record is None:
        return _refuse(RefusalCode.TOKEN_UNKNOWN, "this run never issued this join token: ask for a new one")
    name = f"join token {record.token_id}"
    if record.revoked:
        return _refuse(RefusalCode.TOKEN_REVOKED, f"{name} was revoked: ask for a new one")
    if public_key_hash in record.bound:
        return Decision()
    if record.closed:
        why = f"{name} admits no more nodes, since one of its nodes was evicted: ask for a new one"
        return _refuse(RefusalCode.TOKEN_REVOKED, why)
    if now >= record.expires:
        return _refuse(RefusalCode.TOKEN_EXPIRED, f"{name} has expired: ask for a new one")
    if record.uses >= record.uses_allowed:
        oldest = min(record.unclaimed, key=lambda key: (record.unclaimed[key], key), default=None)
        if oldest is not None and now - record.unclaimed[oldest] >= CLAIM_SECONDS:
            return Decision(new_use=True, in_place_of=oldest)
        used = f"{name} is used up ({record.uses} of {record.uses_allowed} uses)"
        later = (
            "" if oldest is None else ", or try again in a minute: a node that it admitted has not come yet"
        )
        return _refuse(RefusalCode.TOKEN_USED_UP, f"{used}: ask for a new one{later}")
    return Decision(new_use=True)


def _refuse(code: RefusalCode, message: str) -> Decision:
    return Decision(refusal=Refusal(code, message))


def new_token_id() -> str:
    """A random token id: 8 base58 letters."""
    return "".join(secrets.choice(_BASE58) for _ in range(_ID_LETTERS))


def new_secret() -> bytes:
    """A random token secret: 16 bytes."""
    return secrets.token_bytes(_SECRET_BYTES)
