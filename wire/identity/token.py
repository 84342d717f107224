"""The join token: its text form, and the rules for admitting it.

    tw1_<body>_<token id>_<secret>_<checksum>

Body and secret are base58, the id is 8 base58 characters, and the checksum is the CRC-32 of everything before
it in 8 hex digits. A double click selects the whole token, and a truncated paste is detected offline. The
body is: run id (length byte, UTF-8), CA pin (32 bytes), number of addresses (byte), each address (length
byte, UTF-8). The rules (`admit`) are pure: they take a record and a time. The coordinator's database applies
them.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
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
"""The most bytes of an address: each length is stored in a byte, like the number of addresses."""
MAX_ADDRESSES_BYTES = 2800
"""The most bytes of all addresses with their length bytes, which keeps a token below `_LONGEST`."""
MOST_USES = 1_000_000
LONGEST_TTL = timedelta(days=366)
"""The longest lifetime that an operator may give a token."""
# Decoding base58 takes quadratic time; no real token is near this long.
_LONGEST = 4096


def token_in(text: str) -> str:
    """The token in a pasted join line, or else the last word. A mail program may have wrapped the token."""
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
    """The inverse of `base58_encode`. Raises ValueError for a character outside the alphabet."""
    number = 0
    for letter in text:
        number = number * 58 + _BASE58.index(letter)
    return b"\0" * (len(text) - len(text.lstrip("1"))) + number.to_bytes((number.bit_length() + 7) // 8)


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Everything a volunteer's machine needs to ask for a certificate in one run."""

    addresses: tuple[str, ...]
    """The addresses of the coordinator's join port, host:port, in the order in which to try them."""
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
        """The text that a volunteer pastes. It contains the secret, so show it once and never log it."""
        run_id = self.run_id.encode()
        body = bytes([len(run_id)]) + run_id + self.pin + bytes([len(self.addresses)])
        for address in self.addresses:
            packed = address.encode()
            body += bytes([len(packed)]) + packed
        text = f"{_PREFIX}_{base58_encode(body)}_{self.token_id}_{base58_encode(self.secret)}"
        return f"{text}_{crc32(text.encode()):08x}"

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """Read a pasted token. White space is dropped, because a terminal may have wrapped the line.

        Raises TokenError, which never repeats the token.
        """
        text = "".join(text.split())
        prefix, _, rest = text.partition("_")
        if prefix != _PREFIX:
            if prefix.startswith("tw") and prefix[2:].isdigit():
                raise TokenError(
                    f"this join token has format {shortened(prefix)!r}, but this thinwire reads "
                    f"{_PREFIX!r}: install the coordinator's version of thinwire"
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
    """(addresses, run id, pin) of a token's body. Raises ValueError for any other content."""
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
    """The hash of a secret that the coordinator stores. SHA-256 is enough for 128 random bits."""
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
    """The keys whose nodes have not connected yet, with the times of their admission."""
    closed: bool = False
    """Whether no further key is admitted, because a node of the token was evicted. Others may return."""

    @property
    def uses(self) -> int:
        """The number of admitted keys. A key that asks again uses nothing."""
        return len(self.bound)

    def state(self, now: float) -> str:
        """`usable` at Unix time `now`, or the reason why no further key is admitted."""
        if self.revoked:
            return "revoked"
        if self.closed:
            return "closed"
        if now >= self.expires:
            return "expired"
        return "used up" if self.uses >= self.uses_allowed else "usable"


@dataclass(frozen=True, slots=True)
class Decision:
    """`refusal` is None if the key is admitted; with `new_use` it must first be bound to the token."""

    refusal: Refusal | None = None
    new_use: bool = False
    in_place_of: bytes | None = None
    """The key that loses its use to this one, because its node never connected."""


CLAIM_SECONDS = 60.0
"""How long an admitted node may take to connect. After that, its use of the token may go to another node."""


def admit(record: TokenRecord | None, secret: bytes, public_key_hash: bytes, now: float) -> Decision:
    """Whether a token admits a key at Unix time `now`. `record` is None for an unknown id.

    It is idempotent for a token and key, so a node whose reply was lost can ask again. A key that was
    admitted once stays admitted after the token has expired, so a node that was off until its certificate
    expired needs no new token. When no use is left, a use whose node did not connect within `CLAIM_SECONDS`
    goes to the next node that asks. A wrong secret gets the same answer as an unknown id, so ids cannot be
    probed.
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
        why = f"{name} admits no more nodes because one of its nodes was evicted: ask for a new one"
        return _refuse(RefusalCode.TOKEN_REVOKED, why)
    if now >= record.expires:
        return _refuse(RefusalCode.TOKEN_EXPIRED, f"{name} has expired: ask for a new one")
    if record.uses >= record.uses_allowed:
        oldest = min(record.unclaimed, key=lambda key: (record.unclaimed[key], key), default=None)
        if oldest is not None and now - record.unclaimed[oldest] >= CLAIM_SECONDS:
            return Decision(new_use=True, in_place_of=oldest)
        used = f"{name} is used up ({record.uses} of {record.uses_allowed} uses)"
        later = (
            ""
            if oldest is None
            else ", or try again in a minute, because a node that it admitted has not connected yet"
        )
        return _refuse(RefusalCode.TOKEN_USED_UP, f"{used}: ask for a new one{later}")
    return Decision(new_use=True)


def _refuse(code: RefusalCode, message: str) -> Decision:
    return Decision(refusal=Refusal(code, message))


def new_token_id() -> str:
    """A random token id: 8 base58 characters."""
    return "".join(secrets.choice(_BASE58) for _ in range(_ID_LETTERS))


def new_secret() -> bytes:
    """A random token secret: 16 bytes."""
    return secrets.token_bytes(_SECRET_BYTES)
