"""How many nodes the tokens still admit: counted over all of them, and told when it changes."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from node.coordinator.enrolment import token_uses_told, uses_left
from node.coordinator.store import Store
from node.telemetry import events
from wire.errors import RunError
from wire.identity.token import TokenRecord

NOW = 1_700_000_000.0
TOKEN = TokenRecord("t", b"h" * 32, NOW - 10, NOW + 10, 3)


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        ([], 0),
        ([TOKEN], 3),
        ([TOKEN.bind(b"a" * 32), TOKEN], 5),
        ([replace(TOKEN, revoked=True), replace(TOKEN, expires=NOW)], 0),
    ],
)
def test_revoked_expired_and_used_tokens_admit_nobody(tokens: list[TokenRecord], left: int) -> None:
    assert uses_left(tokens, NOW) == left


async def told_next(told: "asyncio.Queue[events.Event]") -> int:
    event = await asyncio.wait_for(told.get(), 20)
    assert isinstance(event, events.TokenUses)
    return event.left


async def test_every_change_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: asyncio.Queue[events.Event] = asyncio.Queue()
    now = NOW
    with Store.create(tmp_path / "run", run_id="r-1", config_json="{}", pin=b"p" * 32, now=NOW) as store:
        store.set_addresses(["127.0.0.1:7700"])
        store.create_token(NOW, timedelta(hours=1), 3)
        async with token_uses_told(store, told.put_nowait, interval=0.01, clock=lambda: now):
            assert await told_next(told) == 3
            # Made by another process, as `thinwire token create` is.
            with Store.open(tmp_path / "run") as other:
                record, _ = other.create_token(NOW, timedelta(hours=2), 2)
            assert await told_next(told) == 5
            now += 3600
            assert await told_next(told) == 2

            def unreadable() -> list[TokenRecord]:
                raise RunError("the disk is away")

            with monkeypatch.context() as patch:
                patch.setattr(store, "list_tokens", unreadable)
                await asyncio.sleep(0.05)
            store.revoke_token(record.token_id)
            assert await told_next(told) == 0
            await asyncio.sleep(0.05)
    assert told.empty()
