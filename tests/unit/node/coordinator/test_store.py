"""The coordinator's database: records, refusals, and concurrent access."""

import math
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from node.coordinator.database import is_empty
from node.coordinator.store import (
    DATABASE_FILE,
    NORMS_KEPT,
    Member,
    PlacedNode,
    SnapshotRecord,
    StepOutcome,
    StepRecord,
    Store,
)
from tests.support.full_disk import full_disk
from wire.errors import RefusalCode, RunError, UserError
from wire.identity.enrolment import Hardware
from wire.identity.names import node_id_of
from wire.identity.token import Decision, base58_encode
from wire.version import PROTOCOL, VERSION

NOW = 1_800_000_000.0
DAY = timedelta(hours=24)
PIN = bytes(range(32))
STEP = StepRecord(
    step=0, epoch=1, loss=5.5, grad_norm=0.1, lr=1e-3, clip=1.0, tokens=4096, seconds=0.25, committed_at=NOW
)


def make_member(number: int, joined: float = NOW) -> Member:
    key = number.to_bytes(32)
    return Member(node_id_of(key), key, Hardware("cpu", 2, 2**33), joined)


def admit(store: Store, member: Member) -> Decision:
    _, token = store.create_token(NOW, DAY, 1)
    return store.admit_token(token.token_id, token.secret, member)


def create(directory: Path) -> Store:
    store = Store.create(directory, run_id="run-a", config_json='{"a": {}}', pin=PIN, now=NOW)
    store.set_addresses(["127.0.0.1:7700"])
    return store


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    with create(directory) as store:
        yield store


def test_a_run_keeps_the_settings_it_was_created_with(store: Store, directory: Path) -> None:
    run = store.run()
    assert (run.run_id, run.config_json, run.pin, run.created) == ("run-a", '{"a": {}}', PIN, NOW)
    assert (run.version, run.protocol, run.addresses) == (VERSION, PROTOCOL, ("127.0.0.1:7700",))
    with Store.open(directory) as again:
        assert again.run() == run


def test_writes_are_on_disk_when_they_return(directory: Path) -> None:
    create(directory).close()
    with create(directory.with_name("other")) as created, Store.open(directory) as opened:
        for store in (created, opened):
            assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"r\xc3\xbcn %20?x=y \xff")
    create(directory).close()
    with Store.open(directory) as store:
        assert store.run().run_id == "run-a"
    assert [path.name for path in directory.iterdir()] == [DATABASE_FILE]


def test_a_directory_holds_one_run(store: Store, directory: Path) -> None:
    with pytest.raises(UserError, match="already has a run"):
        create(directory)
    assert store.run().run_id == "run-a"


def test_a_folder_that_is_not_a_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no run"):
        Store.open(tmp_path)
    (tmp_path / DATABASE_FILE).write_bytes(b"this is not a database, whatever its name may be" * 10)
    with pytest.raises(UserError, match="not a run's database"):
        Store.open(tmp_path)


def test_another_schema_says_so(directory: Path) -> None:
    create(directory).close()
    for version, expected in (
        (7, "has schema 7 and this"),
        (1, "has schema 1 and this"),
        (0, "never finished"),
    ):
        database = sqlite3.connect(directory / DATABASE_FILE)
        database.execute(f"PRAGMA user_version = {version}")
        database.close()
        with pytest.raises(UserError, match=expected):
            Store.open(directory)


def test_a_creation_that_was_cut_short_can_be_done_again(directory: Path) -> None:
    directory.mkdir()
    (directory / DATABASE_FILE).touch()
    with pytest.raises(UserError, match="never finished"):
        Store.open(directory)
    create(directory).close()


# ---- tokens and members


def test_a_token_admits_and_lists(store: Store) -> None:
    record, token = store.create_token(NOW, DAY, 2)
    assert (token.addresses, token.run_id, token.pin) == (("127.0.0.1:7700",), "run-a", PIN)
    assert (record.created, record.expires, record.uses_allowed, record.uses) == (NOW, NOW + 86400, 2, 0)
    member = make_member(1)
    assert store.admit_token(token.token_id, token.secret, member).refusal is None
    (listed,) = store.list_tokens()
    assert listed == replace(record, bound=frozenset({member.public_key_hash}))
    assert store.members() == [member]


def test_joining_again_keeps_the_first_time_and_no_use(store: Store) -> None:
    _, token = store.create_token(NOW, DAY, 1)
    first = make_member(1)
    store.admit_token(token.token_id, token.secret, first)
    stronger = replace(first, hardware=Hardware("gpu", 16, 2**37), joined=NOW + 60)
    assert store.admit_token(token.token_id, token.secret, stronger).refusal is None
    assert store.members() == [replace(stronger, joined=NOW)]
    assert store.list_tokens()[0].uses == 1


@pytest.mark.parametrize("case", ["unknown", "name taken"])
def test_a_refused_call_leaves_no_state(store: Store, case: str) -> None:
    """Other refusals are those of `test_token_machine`."""
    _, token = store.create_token(NOW, DAY, 1)
    member, expected = make_member(1), RefusalCode.TOKEN_UNKNOWN
    if case == "name taken":
        expected = RefusalCode.BAD_REQUEST
        admit(store, replace(make_member(2), node_id=member.node_id))
    before = (store.list_tokens(), store.members())
    token_id = "zzzzzzzz" if case == "unknown" else token.token_id
    decision = store.admit_token(token_id, token.secret, member)
    assert decision.refusal is not None and decision.refusal.code is expected
    assert (store.list_tokens(), store.members()) == before


def test_a_token_that_admits_nobody_is_not_made(store: Store) -> None:
    for ttl, uses in ((DAY, 0), (timedelta(0), 1), (timedelta(seconds=-1), 1)):
        with pytest.raises(UserError, match="admits no node"):
            store.create_token(NOW, ttl, uses)
    store.set_addresses([])
    with pytest.raises(UserError, match="no address yet"):
        store.create_token(NOW, DAY, 1)
    assert store.list_tokens() == []


def test_an_evicted_node_stays_out(store: Store) -> None:
    member = make_member(1)
    admit(store, member)
    assert store.evict(member.node_id, NOW + 5) and store.evict(member.node_id, NOW + 9)
    assert store.evicted() == [member.node_id]
    assert store.member(member.node_id) == replace(member, evicted=NOW + 5)
    refusal = admit(store, member).refusal
    assert refusal is not None and refusal.code is RefusalCode.EVICTED
    assert not store.evict("node-aaaaaaaaaa", NOW)
    assert store.member("node-aaaaaaaaaa") is None


def test_the_secret_is_nowhere_in_the_files(store: Store, directory: Path) -> None:
    tokens = [store.create_token(NOW, DAY, 1)[1] for _ in range(5)]
    for number, token in enumerate(tokens):
        store.admit_token(token.token_id, token.secret, make_member(number))
    content = b"".join(file.read_bytes() for file in directory.iterdir())
    assert tokens[0].token_id.encode() in content
    for token in tokens:
        for form in (token.secret, token.secret.hex().encode(), base58_encode(token.secret).encode()):
            assert form not in content


# ---- steps, epochs, snapshots, events


def test_steps_are_kept_in_order(store: Store) -> None:
    assert store.last_step() is None and store.steps() == []
    records = [replace(STEP, step=step, loss=5.5 - step / 7) for step in range(5)]
    for record in reversed(records):
        assert store.record_step(record) is StepOutcome.NEW
    assert store.steps() == records
    assert store.steps(after=2) == records[3:]
    assert store.last_step() == records[-1]
    store.record_step(replace(STEP, step=5, clip=0.0))
    assert (store.steps_with_clip(0.0), store.steps_with_clip(STEP.clip)) == ([5], [0, 1, 2, 3, 4])


def test_a_replayed_step_keeps_the_first_and_compares_bits(store: Store) -> None:
    later = replace(STEP, step=1)
    for record in (STEP, later):
        store.record_step(record)
    assert store.record_step(replace(STEP, epoch=9, committed_at=NOW + 9)) is StepOutcome.REPEATED
    assert store.steps() == [STEP, later]
    assert store.record_step(replace(STEP, loss=math.nextafter(5.5, 6))) is StepOutcome.DIFFERS
    assert store.record_step(replace(STEP, loss=math.nan)) is StepOutcome.DIFFERS
    assert store.record_step(replace(STEP, loss=math.nan)) is StepOutcome.REPEATED


@pytest.mark.parametrize(
    ("again", "outcome"),
    [
        (replace(STEP, epoch=7, loss=5.25, grad_norm=4.0, clip=0.25), StepOutcome.DIFFERS),
        (replace(STEP, epoch=7, lr=5e-4), StepOutcome.REPEATED),
        (replace(STEP, epoch=7, grad_norm=4.0, clip=0.25), StepOutcome.REPEATED),
    ],
)
def test_the_newest_commit_on_record_is_the_one_that_was_sent(
    store: Store, again: StepRecord, outcome: StepOutcome
) -> None:
    """A restarted coordinator repeats the commit to the nodes that voted for it."""
    before = replace(STEP, step=4)
    for record in (before, replace(STEP, step=5), replace(STEP, step=6)):
        store.record_step(record)
    again = replace(again, step=5)
    assert store.record_step(again) is outcome
    assert store.last_step() == again, "step 6 led on from another state"
    assert store.steps() == [before, again]
    assert store.record_step(replace(STEP, step=6, epoch=7)) is StepOutcome.NEW


def test_norms_of_units_follow_the_steps_and_old_ones_are_forgotten(store: Store) -> None:
    assert store.unit_norms(after=-1) == {}
    norms = {step: {0: step + 0.1, 7: 1e300} for step in range(4)}
    for step, found in norms.items():
        store.record_step(replace(STEP, step=step), found)
    assert store.unit_norms(after=-1) == norms
    assert store.unit_norms(after=2) == {3: norms[3]}
    store.record_step(replace(STEP, step=2), {0: 9.0})
    assert store.unit_norms(after=1) == {2: norms[2], 3: norms[3]}, "a replay changes nothing"
    store.record_step(replace(STEP, step=2, loss=7.0), {0: 9.0})
    assert store.unit_norms(after=1) == {2: {0: 9.0}}, "step 3 led on from another state"
    store.record_step(replace(STEP, step=NORMS_KEPT + 2), {0: 1.0})
    assert list(store.unit_norms(after=-1)) == [2, NORMS_KEPT + 2]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 0.0, 3.0, 5e-324, 0.1 + 0.2])
def test_every_loss_comes_back_with_its_bits(store: Store, loss: float) -> None:
    store.record_step(replace(STEP, loss=loss, grad_norm=loss))
    found = store.last_step()
    assert found is not None
    assert repr(found) == repr(replace(STEP, loss=loss, grad_norm=loss))
    assert store.record_step(replace(STEP, loss=loss)) is StepOutcome.REPEATED


def test_rows_of_a_grid_are_kept(store: Store) -> None:
    first = [PlacedNode(stage, f"a{stage}", "a:1") for stage in range(2)]
    second = [PlacedNode(stage, f"b{stage}", "b:1", 1) for stage in range(2)]
    store.record_placement(1, [*first, *second])
    assert store.placement(1) == [*first, *second]
    store.record_placement(1, first)
    store.record_placement(2, [*first, *second])
    assert (store.placement(1), store.placement(2)) == (first, [*first, *second])
    assert store.last_epoch() == 2


def test_snapshots_are_completed_and_deleted(store: Store) -> None:
    first = SnapshotRecord(step=100, manifest_sha256="ab" * 32, bytes=2**40, complete=False, created=NOW)
    store.record_snapshot(replace(first, step=200))
    store.record_snapshot(first)
    store.record_snapshot(replace(first, complete=True))
    assert store.snapshots() == [replace(first, complete=True), replace(first, step=200)]
    assert store.delete_snapshot(100) and not store.delete_snapshot(100)
    assert [snapshot.step for snapshot in store.snapshots()] == [200]


# ---- several users at once


def test_threads_share_one_single_use_token(directory: Path) -> None:
    with create(directory) as store, Store.open(directory) as other:
        _, token = store.create_token(NOW, DAY, 1)
        barrier = threading.Barrier(8)

        def join(number: int) -> bool:
            barrier.wait(timeout=60)
            mine = store if number % 2 else other
            return mine.admit_token(token.token_id, token.secret, make_member(number)).refusal is None

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(join, range(8))) == 1
        assert store.list_tokens()[0].uses == len(store.members()) == 1


def test_two_processes_write_at_once(store: Store, directory: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from node.coordinator.store import SnapshotRecord\n"
        "from node.coordinator.store import Store\n"
        "with Store.open(pathlib.Path(sys.argv[1])) as store:\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    for number in range(200):\n"
        "        store.record_snapshot(SnapshotRecord(1000 + number, 'theirs', 1, False, 0.0))\n"
    )
    command = [sys.executable, "-c", script, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        for number in range(200):
            store.record_snapshot(SnapshotRecord(number, "mine", 1, False, 0.0))
    assert process.returncode == 0
    written = [(snapshot.manifest_sha256, snapshot.step) for snapshot in store.snapshots()]
    starts = (("mine", 0), ("theirs", 1000))
    assert written == [(who, start + number) for who, start in starts for number in range(200)]


def test_a_full_disk_is_one_clear_line_and_loses_nothing(directory: Path) -> None:
    with create(directory) as store:
        store.record_step(STEP)
    with Store.open(directory) as store:
        with full_disk(8192), pytest.raises(RunError, match=r"cannot be used"):
            store.record_snapshot(SnapshotRecord(1, "x" * 100_000, 1, False, NOW))
        assert store.steps() == [STEP] and store.snapshots() == []
        assert store.record_step(replace(STEP, step=1)) is StepOutcome.NEW


def test_a_database_on_a_full_disk_is_read_and_not_taken_for_damaged(directory: Path) -> None:
    """Nothing can be created beside it, as on a full disk."""
    with create(directory) as store:
        store.record_step(STEP)
    with full_disk(0):
        for _ in range(2):
            with Store.open(directory) as store:
                assert store.steps() == [STEP]
                with pytest.raises(RunError):
                    store.record_step(replace(STEP, step=1))
        assert is_empty(directory / DATABASE_FILE) is False
    with Store.open(directory) as store:
        assert store.record_step(replace(STEP, step=1)) is StepOutcome.NEW


def test_an_eviction_is_told_without_the_tokens_secret(store: Store) -> None:
    _, token = store.create_token(NOW, DAY, 4)
    liar, honest = map(make_member, (1, 2))
    for member in (liar, honest):
        assert store.admit_token(token.token_id, token.secret, member).refusal is None
    for keep_token, state in ((True, "usable"), (False, "closed")):
        said = str(store.evict(liar.node_id, NOW, keep_token=keep_token))
        assert token.token_id in said and honest.node_id in said
        assert base58_encode(token.secret) not in said and token.secret.hex() not in said
        assert [record.state(NOW) for record in store.list_tokens()] == [state]


def test_a_closed_store_says_so(directory: Path) -> None:
    store = create(directory)
    store.close()
    with pytest.raises(RunError, match="closed"):
        store.members()


def test_a_write_that_fails_halfway_changes_nothing(store: Store) -> None:
    nodes = [PlacedNode(stage, make_member(stage).node_id, "10.0.0.1:7800") for stage in range(2)]
    store.record_placement(1, nodes)
    with pytest.raises(RunError, match="cannot be used"):
        store.record_placement(1, [nodes[0], nodes[0]])
    assert store.placement(1) == nodes


def test_ids_that_are_not_text_belong_to_nobody(directory: Path) -> None:
    """JSON and a command's arguments may hold half of a surrogate pair, for which SQLite has no form."""
    with create(directory) as store:
        for nobody in ("\ud800", "node-\udcff", "kn\u00f6tchen"):
            assert not store.evict(nobody, NOW)
            assert not store.revoke_token(nobody)


# ---- a run's database where it may only be read: on read-only media, or as another user


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Of a run that ended. Its name is one that a URI would take for its own signs."""
    ended = tmp_path / "a run? #1 %41"
    with Store.create(ended, run_id="run-a", config_json='{"a": {}}', pin=bytes(32), now=NOW) as store:
        store.set_addresses(["127.0.0.1:7700"])
    return ended


@pytest.fixture
def read_only(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ended` is, as `access` has it there; tests run as root, who may write whatever permissions say."""
    real = os.access
    monkeypatch.setattr(
        "node.coordinator.database.os.access",
        lambda path, mode: mode != os.W_OK and real(path, mode),
    )


@pytest.mark.usefixtures("read_only")
def test_a_run_that_ended_is_read_and_leaves_no_file_beside_it(ended: Path) -> None:
    before = sorted(path.name for path in ended.iterdir())
    with Store.open(ended) as store:
        assert store.run().run_id == "run-a"
        with pytest.raises(RunError, match="read-only"):
            store.create_token(NOW, timedelta(hours=1), 1)
        with pytest.raises(RunError, match="cannot be changed"):
            store.set_addresses(["127.0.0.1:7700"])
        assert sorted(path.name for path in ended.iterdir()) == before


def test_a_run_that_goes_on_is_read_as_it_is_now(ended: Path, request: pytest.FixtureRequest) -> None:
    with Store.open(ended) as writer:
        writer.set_addresses(["127.0.0.1:7701"])
        assert ended.joinpath(f"{DATABASE_FILE}-wal").exists()
        request.getfixturevalue("read_only")
        with Store.open(ended) as store:
            assert store.run().addresses == ("127.0.0.1:7701",)
            writer.set_addresses(["127.0.0.1:7702"])
            assert store.run().addresses == ("127.0.0.1:7702",)


@pytest.mark.usefixtures("read_only")
def test_a_file_that_is_not_a_database_is_refused_there_too(ended: Path) -> None:
    (ended / DATABASE_FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="is not a run's database"):
        Store.open(ended)
