"""The join token's text form, and the rules that admit by it."""

from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import RefusalCode, TokenError
from wire.identity.token import (
    JoinToken,
    TokenRecord,
    admit,
    base58_decode,
    base58_encode,
    hash_secret,
    new_secret,
    new_token_id,
)

TOKEN = JoinToken(
    addresses=("192.168.1.4:7700", "[2001:db8::1]:7700", "coordinator.example.org:443"),
    run_id="my-run-a2b3c",
    pin=bytes(range(32)),
    token_id="4xKZ9abc",
    secret=bytes(range(100, 116)),
)
SECRET, KEY, OTHER_KEY = b"s" * 16, b"k" * 32, b"o" * 32
RECORD = TokenRecord("4xKZ9abc", hash_secret(SECRET), created=1000.0, expires=2000.0, uses_allowed=1)

hosts = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,60}[a-z0-9])?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)
addresses = st.builds(lambda host, port: f"{host}:{port}", hosts, st.integers(1, 65535))
tokens = st.builds(
    JoinToken,
    addresses=st.lists(addresses, min_size=1, max_size=4).map(tuple),
    run_id=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True),
    pin=st.binary(min_size=32, max_size=32),
    token_id=st.builds(new_token_id),
    secret=st.binary(min_size=16, max_size=16),
)


@given(tokens)
def test_encoding_and_parsing_round_trip(token: JoinToken) -> None:
    assert JoinToken.parse(token.encode()) == token


def test_the_text_form_is_fixed() -> None:
    text = TOKEN.encode()
    assert text == (
        "tw1_7wuRoDPSBGcCkZT4my8Ab1mPx9JFiXNoTjjWfk3umLdVeqfk3gEQzSiU12GNxzdAKHkn5izXSNzUt9yXdWRSUdDSEaFxQK5"
        "ezxq16AyYLqnQhDy7yoEf9jddW9wd7rPsruwJfMbytyvm4R3GTwdiZp_4xKZ9abc_DQ3eMDHz1XVqECEzqPkzjL_9abd43b4"
    )
    head, checksum = text.rsplit("_", 1)
    assert checksum == f"{crc32(head.encode()):08x}"


@given(st.binary(max_size=60))
def test_base58_is_reversible(data: bytes) -> None:
    assert base58_decode(base58_encode(data)) == data


def test_base58_is_bitcoins() -> None:
    # From the test vectors of draft-msporny-base58.
    assert base58_encode(b"Hello World!") == "2NEpo7TZRRrLZSi2U"
    assert base58_encode(bytes.fromhex("0000287fb4cd")) == "11233QC4"


def test_white_space_of_a_wrapped_paste_is_dropped() -> None:
    text = TOKEN.encode()
    assert JoinToken.parse(f"  {text[:40]}\n  {text[40:80]}\r\n{text[80:]}\n") == TOKEN


def test_every_truncation_is_caught_offline() -> None:
    text = TOKEN.encode()
    for length in range(len(text)):
        with pytest.raises(TokenError, match=r"cut short|mistyped|not a join token"):
            JoinToken.parse(text[:length])
    for start in range(1, 60):
        with pytest.raises(TokenError):
            JoinToken.parse(text[start:])


def test_every_mistyped_letter_is_caught_offline() -> None:
    text = TOKEN.encode()
    for position in range(len(text)):
        for letter in "2zé":
            if text[position] != letter:
                with pytest.raises(TokenError):
                    JoinToken.parse(text[:position] + letter + text[position + 1 :])


def test_another_version_says_so() -> None:
    with pytest.raises(TokenError, match=r"'tw2', .* 'tw1': install"):
        JoinToken.parse(TOKEN.encode().replace("tw1", "tw2", 1))


@pytest.mark.parametrize("text", ["", "hello", "tw", "twin_a_b_c_deadbeef", "tw1", "\udc80"])
def test_text_that_is_not_a_token_is_reported(text: str) -> None:
    with pytest.raises(TokenError, match=r"not a join token|cut short"):
        JoinToken.parse(text)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x05abc",
        b"\x03abc" + bytes(32),
        b"\x03abc" + bytes(32) + b"\x00",
        b"\x03ABC" + bytes(32) + b"\x01\x03h:1",
        b"\x03abc" + bytes(32) + b"\x01\x03h:1" + b"more",
    ],
)
def test_a_right_checksum_over_nonsense_is_refused(body: bytes) -> None:
    text = f"tw1_{base58_encode(body)}_4xKZ9abc_{base58_encode(bytes(16))}"
    with pytest.raises(TokenError, match="malformed"):
        JoinToken.parse(f"{text}_{crc32(text.encode()):08x}")


def test_an_endless_paste_is_refused_at_once() -> None:
    text = f"tw1_{'z' * 1_000_000}_4xKZ9abc_1111111111111111"
    with pytest.raises(TokenError, match="mistyped"):
        JoinToken.parse(f"{text}_{crc32(text.encode()):08x}")


def test_the_secret_never_shows() -> None:
    shown = f"{TOKEN!r} {TOKEN} {TOKEN!s} {RECORD!r}"
    for secret in (TOKEN.secret, SECRET, RECORD.secret_hash):
        for form in (repr(secret)[2:-1], secret.hex(), base58_encode(secret)):
            assert form not in shown
    damaged = TOKEN.encode()[:-1] + "x"
    with pytest.raises(TokenError) as caught:
        JoinToken.parse(damaged)
    assert base58_encode(TOKEN.secret) not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ()},
        {"addresses": ("nowhere",)},
        {"run_id": "Run"},
        {"pin": bytes(31)},
        {"token_id": "short"},
        {"token_id": "4xKZ9ab0"},
        {"secret": bytes(15)},
    ],
)
def test_no_token_is_made_of_wrong_parts(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"join token needs|not an address"):
        replace(TOKEN, **change)  # type: ignore[arg-type]  # the point is that the parts are wrong


def test_fresh_ids_and_secrets_differ() -> None:
    assert len({new_token_id() for _ in range(100)}) == 100
    assert len({new_secret() for _ in range(100)}) == 100


# ---- the rules


def _code(record: TokenRecord | None, secret: bytes = SECRET, key: bytes = KEY, now: float = 1500) -> object:
    refusal = admit(record, secret, key, now).refusal
    return refusal and refusal.code


def test_a_fresh_token_admits_one_key_once_and_again() -> None:
    first = admit(RECORD, SECRET, KEY, 1500.0)
    assert first.refusal is None and first.new_use
    bound = replace(RECORD, bound=frozenset({KEY}))
    again = admit(bound, SECRET, KEY, 1600.0)
    assert again.refusal is None and not again.new_use
    assert bound.uses == 1
    assert _code(bound, key=OTHER_KEY) is RefusalCode.TOKEN_USED_UP


def test_each_refusal_has_its_reason() -> None:
    assert _code(None) is RefusalCode.TOKEN_UNKNOWN
    assert _code(RECORD, secret=b"x" * 16) is RefusalCode.TOKEN_UNKNOWN
    assert _code(RECORD, secret=b"") is RefusalCode.TOKEN_UNKNOWN
    assert _code(RECORD, now=1999.999) is None
    assert _code(RECORD, now=2000.0) is RefusalCode.TOKEN_EXPIRED
    assert _code(replace(RECORD, revoked=True)) is RefusalCode.TOKEN_REVOKED


def test_an_expired_token_still_admits_its_members_and_a_revoked_one_nobody() -> None:
    """A node that was off until its certificate ended rejoins without a new one."""
    bound = replace(RECORD, bound=frozenset({KEY}))
    again = admit(bound, SECRET, KEY, 2000.0)
    assert again.refusal is None and not again.new_use
    assert _code(bound, key=OTHER_KEY, now=2000.0) is RefusalCode.TOKEN_EXPIRED
    assert _code(bound, secret=b"x" * 16, now=2000.0) is RefusalCode.TOKEN_UNKNOWN
    assert _code(replace(bound, revoked=True)) is RefusalCode.TOKEN_REVOKED


def test_a_wrong_secret_is_answered_like_an_unknown_id() -> None:
    dead = replace(RECORD, bound=frozenset({OTHER_KEY}), revoked=True)
    assert admit(dead, b"x" * 16, KEY, 5000.0) == admit(None, b"x" * 16, KEY, 0.0)


def test_refusals_are_one_line_that_says_what_to_do() -> None:
    revoked, used_up = replace(RECORD, revoked=True), replace(RECORD, bound=frozenset({OTHER_KEY}))
    for record, now in ((None, 0.0), (RECORD, 9e9), (revoked, 0.0), (used_up, 0.0)):
        refusal = admit(record, SECRET, KEY, now).refusal
        assert refusal is not None
        assert "\n" not in refusal.message and refusal.message.endswith("ask for a new one")
