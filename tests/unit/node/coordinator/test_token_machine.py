"""Any sequence of token operations, on the real database with an invented clock, against a simple model."""

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from node.coordinator.enrolment import token_uses_told, uses_left
from node.coordinator.store import Member, Store
from node.telemetry import events
from tests.support.examples import examples
from wire.errors import RefusalCode, RunError
from wire.identity.enrolment import Hardware
from wire.identity.names import node_id_of
from wire.identity.token import JoinToken, TokenRecord

KEYS = [bytes([number]) * 32 for number in range(5)]


@dataclass
class Model:
    """A model of tokens, derived from the operations only."""

    token: JoinToken
    expires: float
    uses_allowed: int
    revoked: bool = False
    closed: bool = False
    keys: set[bytes] = field(default_factory=set)


class TokenMachine(RuleBasedStateMachine):
    tokens: Bundle[Model] = Bundle("tokens")

    def __init__(self) -> None:
        super().__init__()
        self.resources = contextlib.ExitStack()
        self.directory = Path(self.resources.enter_context(tempfile.TemporaryDirectory())) / "run"
        self.now = 1_000_000.0
        self.models: list[Model] = []
        self.evicted: set[bytes] = set()

    @initialize()
    def start(self) -> None:
        self.store = Store.create(self.directory, run_id="run", config_json="{}", pin=bytes(32), now=self.now)
        self.store.set_addresses(["127.0.0.1:7700"])

    @rule(target=tokens, ttl=st.sampled_from([1, 60, 86400]), uses=st.integers(1, 3))
    def create(self, ttl: int, uses: int) -> Model:
        record, token = self.store.create_token(self.now, timedelta(seconds=ttl), uses)
        assert record.uses == 0
        model = Model(token, self.now + ttl, uses)
        self.models.append(model)
        return model

    @rule(seconds=st.sampled_from([0.5, 30, 3600, 90000]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([0.5, 3600]))
    def clock_steps_back(self, seconds: float) -> None:
        self.now -= seconds

    @rule(model=tokens, key=st.sampled_from(KEYS))
    def join(self, model: Model, key: bytes) -> None:
        decision = self.store.admit_token(model.token.token_id, model.token.secret, self._member(key))
        code = decision.refusal and decision.refusal.code
        if model.revoked or (model.closed and key not in model.keys):
            assert code is RefusalCode.TOKEN_REVOKED
        elif self.now >= model.expires and key not in model.keys:
            assert code is RefusalCode.TOKEN_EXPIRED
        elif key not in model.keys and len(model.keys) == model.uses_allowed:
            assert code is RefusalCode.TOKEN_USED_UP
        elif key in self.evicted:
            assert code is RefusalCode.EVICTED
        else:
            assert code is None
            assert decision.new_use == (key not in model.keys)
            model.keys.add(key)

    @rule(model=tokens, key=st.sampled_from(KEYS))
    def guess_a_secret(self, model: Model, key: bytes) -> None:
        decision = self.store.admit_token(model.token.token_id, bytes(16), self._member(key))
        assert decision.refusal is not None and decision.refusal.code is RefusalCode.TOKEN_UNKNOWN

    @rule(model=tokens)
    def revoke(self, model: Model) -> None:
        assert self.store.revoke_token(model.token.token_id)
        model.revoked = True

    @rule()
    def restart_the_coordinator(self) -> None:
        self.store.close()
        self.store = Store.open(self.directory)

    @rule(key=st.sampled_from(KEYS), keep_token=st.booleans())
    def evict(self, key: bytes, keep_token: bool) -> None:
        came_by = {model.token.token_id for model in self.models if key in model.keys}
        eviction = self.store.evict(node_id_of(key), self.now, keep_token=keep_token)
        assert {token.token_id for token in eviction.tokens} == came_by if eviction else not came_by
        if eviction:
            self.evicted.add(key)
        for model in self.models:
            model.closed |= key in model.keys and not model.revoked and not keep_token

    @invariant()
    def the_database_agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        records = {record.token_id: record for record in self.store.list_tokens()}
        assert len(records) == len(self.models)
        for model in self.models:
            record = records[model.token.token_id]
            assert record.bound == model.keys
            assert record.uses <= record.uses_allowed == model.uses_allowed
            assert (record.revoked, record.closed) == (model.revoked, model.closed and not model.revoked)
        members = {member.public_key_hash for member in self.store.members()}
        assert members == {key for model in self.models for key in model.keys}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.resources.close()

    def _member(self, key: bytes) -> Member:
        return Member(node_id_of(key), key, Hardware("cpu", 2, 2**30), joined=self.now)


TestTokenMachine = TokenMachine.TestCase
TestTokenMachine.settings = settings(max_examples=examples(20), stateful_step_count=30)


# ---- how many nodes the tokens still admit: counted over all of them, and told when it changes


NOW = 1_700_000_000.0
TOKEN = TokenRecord("t", b"h" * 32, NOW - 10, NOW + 10, 3)


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        ([], 0),
        ([TOKEN], 3),
        ([replace(TOKEN, bound=frozenset({b"a" * 32})), TOKEN], 5),
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
