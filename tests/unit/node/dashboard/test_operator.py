"""Who may change a run: the key, the connection, other sites' pages, rates."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.coordinator.enrolment_service import MOST_COUNTED, RateLimits
from node.dashboard.operator import (
    KEY_ALPHABET,
    KEY_FILE,
    KEY_LENGTH,
    ChangeGuard,
    ChangeRequest,
    Denied,
    OperatorKey,
)
from wire.errors import UserError

KEY = "abcdefghjkmnpqrstuvwxyz234"
FIT = ChangeRequest(
    remote="127.0.0.1",
    secure=False,
    host="127.0.0.1:7702",
    headers={"Authorization": f"Bearer {KEY}", "X-Thinwire": "1"},
)


def guard() -> ChangeGuard:
    return ChangeGuard(OperatorKey(KEY))


def with_headers(request: ChangeRequest, **headers: str) -> ChangeRequest:
    return replace(
        request, headers={**request.headers, **{k.replace("_", "-"): v for k, v in headers.items()}}
    )


def denied(request: ChangeRequest) -> Denied:
    found = guard().check(request, 0.0)
    assert found is not None
    return found


@pytest.mark.parametrize("remote", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
def test_the_key_over_loopback_passes(remote: str) -> None:
    assert guard().check(replace(FIT, remote=remote), 0.0) is None


def test_the_key_over_tls_passes_from_anywhere_and_through_a_proxy() -> None:
    far = replace(FIT, remote="203.0.113.9", secure=True)
    assert guard().check(far, 0.0) is None
    assert guard().check(with_headers(far, X_Forwarded_For="198.51.100.4"), 0.0) is None


@pytest.mark.parametrize(
    "remote", ["192.168.1.7", "203.0.113.9", "2001:db8::7", "::ffff:192.0.2.1", "", "odd"]
)
def test_a_connection_that_can_be_listened_to_is_refused_before_the_key_is_looked_at(remote: str) -> None:
    found = denied(replace(FIT, remote=remote))
    assert found.status == 403 and "dashboard.tls" in found.reason


@pytest.mark.parametrize("name", ["X-Forwarded-For", "forwarded", "VIA", "X-Real-Ip", "x-forwarded-host"])
def test_a_proxy_on_this_machine_is_not_this_machine(name: str) -> None:
    assert denied(replace(FIT, headers={**FIT.headers, name: "198.51.100.4"})).status == 403


def test_another_sites_page_is_refused() -> None:
    without = replace(FIT, headers={"Authorization": f"Bearer {KEY}"})
    assert denied(without).reason == "the header X-Thinwire is missing"
    assert denied(with_headers(FIT, Origin="https://evil.example")).status == 403
    assert denied(with_headers(FIT, Origin="null")).status == 403
    assert guard().check(with_headers(FIT, Origin="http://127.0.0.1:7702"), 0.0) is None


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY])
def test_without_a_key(value: str) -> None:
    found = denied(with_headers(FIT, Authorization=value))
    assert found.status == 401 and not found.is_guess and KEY_FILE in found.reason


@pytest.mark.parametrize(
    "key", [KEY[:-1], KEY + "a", KEY[::-1], "é" * 26, "x" * 4000, "\udcff\udcfe", "\ud800"]
)
def test_a_wrong_key(key: str) -> None:
    assert denied(with_headers(FIT, Authorization=f"Bearer {key}")).status == 401


def test_a_key_may_be_typed_with_blanks_and_capitals() -> None:
    typed = f" {KEY[:13].upper()} {KEY[13:]} "
    assert guard().check(with_headers(FIT, Authorization=f"bearer {typed}"), 0.0) is None


@pytest.mark.parametrize("guesses", [4, 5, 1000])
@pytest.mark.parametrize("remote", ["127.0.0.1", "2001:db8::7"])
def test_wrong_keys_count_against_their_address_and_shut_out_no_right_key(remote: str, guesses: int) -> None:
    one, near = guard(), replace(FIT, remote=remote, secure=True)
    wrong = with_headers(near, Authorization="Bearer nonsense")
    found = [refusal for _ in range(guesses) if (refusal := one.check(wrong, 0.0)) is not None]
    told = min(guesses, ChangeGuard.WRONG_KEYS)
    assert [refusal.status for refusal in found] == [401] * told + [429] * (guesses - told)
    assert sum(refusal.is_guess for refusal in found) == told
    assert one.check(near, 1.0) is None  # also from the address that the guesses come from
    other = one.check(replace(wrong, remote="203.0.113.9"), 1.0)
    again = one.check(wrong, ChangeGuard.SECONDS + 1)
    assert other is not None and again is not None and other.status == again.status == 401


def test_a_network_of_ipv6_addresses_is_one_address() -> None:
    one, wrong = guard(), replace(with_headers(FIT, Authorization="Bearer nonsense"), secure=True)
    found = [one.check(replace(wrong, remote=f"2001:db8::{number:x}"), 0.0) for number in range(1, 8)]
    assert [denied.status for denied in found if denied] == [401] * ChangeGuard.WRONG_KEYS + [429, 429]


def test_changes_come_at_a_bounded_rate() -> None:
    one = guard()
    assert [one.check(FIT, 0.0) for _ in range(ChangeGuard.CHANGES)] == [None] * ChangeGuard.CHANGES
    found = one.check(FIT, 1.0)
    assert found is not None and found.status == 429
    assert one.check(FIT, ChangeGuard.SECONDS + 1) is None


def test_wrong_keys_are_counted_for_no_more_addresses_than_there_is_room_for() -> None:
    limits = RateLimits(0.1, 1)
    assert all(limits.take(str(number), 0.0) for number in range(3 * MOST_COUNTED))
    assert limits.take("0", 1.0) and not limits.take(str(3 * MOST_COUNTED - 1), 1.0)
    assert len(limits._limits) == MOST_COUNTED


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    OperatorKey.load_or_create(tmp_path)
    path = tmp_path / KEY_FILE
    text = path.read_text().strip()
    assert len(text) == KEY_LENGTH and set(text) <= set(KEY_ALPHABET)
    assert path.stat().st_mode & 0o777 == 0o600
    again = OperatorKey.load_or_create(tmp_path)
    assert again.matches(text) and not again.matches(text[1:])
    assert path.read_text().strip() == text


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 40])
def test_a_damaged_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / KEY_FILE).write_bytes(content)
    with pytest.raises(UserError, match="delete it"):
        OperatorKey.load_or_create(tmp_path)
