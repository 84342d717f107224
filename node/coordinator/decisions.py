"""Decisions that were made from measurements, in the run's database: a replay follows them, whatever is
measured then.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from node.coordinator.database import has_table
from node.coordinator.store import Store
from node.run_state.actions import RecordCodecs, RecordStorages
from node.tuning.codec_plan import CodecPlan
from node.tuning.places import PlacePlan, SplitHistory
from node.tuning.rate_control import RateHistory
from node.tuning.storage_choice import StorageHistory, StoragePlan
from wire.errors import ConfigError, UserError

# Runs of an earlier version have no such table.
_CODECS = """CREATE TABLE IF NOT EXISTS codec_plans (
    step INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, plan TEXT NOT NULL)"""
_STORAGES = _CODECS.replace("codec_plans", "storage_plans")
_PLANS = {RecordCodecs: (_CODECS, "codec_plans"), RecordStorages: (_STORAGES, "storage_plans")}
_PLACES = "CREATE TABLE IF NOT EXISTS place_plans (epoch INTEGER PRIMARY KEY, plan TEXT NOT NULL)"
_SPLITS = "CREATE TABLE IF NOT EXISTS splits (step INTEGER PRIMARY KEY, split TEXT NOT NULL)"


def record_plan(store: Store, record: RecordCodecs | RecordStorages) -> None:
    """From its step on the run has this plan, in place of what was on record for later steps."""
    created, table = _PLANS[type(record)]
    with store.writing() as db:
        db.execute(created)
        db.execute(f"DELETE FROM {table} WHERE step >= ?", (record.step,))
        values = record.step, record.epoch, record.plan.to_json()
        db.execute(f"INSERT INTO {table} VALUES (?, ?, ?)", values)


def recorded_codecs(store: Store) -> RateHistory:
    """The plans of the run's steps. Raises UserError for a damaged record."""
    with _damage_named(store):
        return RateHistory(
            tuple((step, CodecPlan.from_json(plan)) for step, plan in _recorded(store, "codec_plans"))
        )


def recorded_storages(store: Store) -> StorageHistory:
    """As `recorded_codecs`, of what stages store their activations in."""
    with _damage_named(store):
        return StorageHistory(
            tuple((step, StoragePlan.from_json(plan)) for step, plan in _recorded(store, "storage_plans"))
        )


def _recorded(store: Store, table: str) -> list[tuple[int, str]]:
    with store.reading() as db:
        if not has_table(db, table):
            return []
        return list(db.execute(f"SELECT step, plan FROM {table} ORDER BY step"))


@contextmanager
def _damage_named(store: Store) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise UserError(f"{store.path}: {error}: put back a copy of it") from None


def record_places(store: Store, plan: PlacePlan) -> None:
    """The placement after the newest one is this."""
    with store.writing() as db:
        db.execute(_PLACES)
        newest = "SELECT coalesce(max(epoch), 0) FROM placements"
        db.execute(f"INSERT OR REPLACE INTO place_plans VALUES (({newest}), ?)", (plan.to_json(),))


def recorded_places(store: Store) -> tuple[int, PlacePlan, int] | None:
    """The newest plan behind the epoch that it ends, and how many there are. Raises UserError for a damaged
    record."""
    with store.reading() as db:
        if not has_table(db, "place_plans"):
            return None
        row = db.execute("SELECT epoch, plan FROM place_plans ORDER BY epoch DESC LIMIT 1").fetchone()
        count = db.execute("SELECT count(*) FROM place_plans").fetchone()[0]
    with _damage_named(store):
        return None if row is None else (row[0], PlacePlan.from_json(row[1]), count)


def record_splits(store: Store, history: SplitHistory) -> None:
    """These are the splits of the run's steps."""
    with store.writing() as db:
        db.execute(_SPLITS)
        db.execute("DELETE FROM splits")
        rows = [(step, json.dumps(split)) for step, split in history.changes]
        db.executemany("INSERT INTO splits VALUES (?, ?)", rows)


def recorded_splits(store: Store) -> SplitHistory:
    """The splits of the run's steps. Raises UserError for a damaged record."""
    with store.reading() as db:
        if not has_table(db, "splits"):
            return SplitHistory()
        rows = db.execute("SELECT step, split FROM splits ORDER BY step").fetchall()
    try:
        return SplitHistory(tuple((step, tuple(map(int, json.loads(split)))) for step, split in rows))
    except (ValueError, TypeError) as error:
        raise UserError(f"{store.path}: a split is damaged ({error}): put back a copy of it") from None
