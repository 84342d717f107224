"""Decisions that were made from measurements, in one table of the run's database: a replay follows them,
whatever is measured then.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from node.coordinator.database import has_table
from node.coordinator.store import Store
from node.run_state.actions import RecordCodecs, RecordStorages
from node.tuning.codec_plan import CodecPlan
from node.tuning.places import PlacePlan, SplitHistory
from node.tuning.rate_control import RateHistory
from node.tuning.storage_choice import StorageHistory, StoragePlan
from wire.errors import ConfigError, UserError

Decided = TypeVar("Decided")

# `at` is the step that a decision holds from; of places it is the epoch that they end.
_TABLE = """CREATE TABLE decisions (
    kind TEXT NOT NULL, at INTEGER NOT NULL, decision TEXT NOT NULL, PRIMARY KEY (kind, at))"""
CODECS, STORAGES, PLACES, SPLITS = "codecs", "storages", "places", "splits"
_EARLIER = {
    CODECS: ("codec_plans", "step, plan"),
    STORAGES: ("storage_plans", "step, plan"),
    PLACES: ("place_plans", "epoch, plan"),
    SPLITS: ("splits", "step, split"),
}
"""Tables and columns in which runs that began earlier have their decisions."""


@contextmanager
def _writing(store: Store) -> Iterator[sqlite3.Connection]:
    """A transaction in which the table is there, with what earlier tables hold."""
    with store.writing() as db:
        if not has_table(db, "decisions"):
            db.execute(_TABLE)
            for kind, (table, columns) in _EARLIER.items():
                if has_table(db, table):
                    db.execute(f"INSERT INTO decisions SELECT ?, {columns} FROM {table}", (kind,))
        yield db


def _recorded(store: Store, kind: str, read: Callable[[str], Decided]) -> tuple[tuple[int, Decided], ...]:
    """All decisions of a kind in the order of steps. Raises UserError for a damaged one."""
    with store.reading() as db:
        table, columns = _EARLIER[kind]
        if has_table(db, "decisions"):
            table, columns = f"decisions WHERE kind = '{kind}'", "at, decision"
        elif not has_table(db, table):
            return ()
        rows = db.execute(f"SELECT {columns} FROM {table} ORDER BY 1").fetchall()
    try:
        return tuple((at, read(text)) for at, text in rows)
    except (ConfigError, ValueError, TypeError) as error:
        raise UserError(f"{store.path}: {error}: put back a copy of it") from None


def record_plan(store: Store, record: RecordCodecs | RecordStorages) -> None:
    """From its step on the run has this plan, in place of what was on record for later steps."""
    kind = CODECS if isinstance(record, RecordCodecs) else STORAGES
    with _writing(store) as db:
        db.execute("DELETE FROM decisions WHERE kind = ? AND at >= ?", (kind, record.step))
        db.execute("INSERT INTO decisions VALUES (?, ?, ?)", (kind, record.step, record.plan.to_json()))


def recorded_codecs(store: Store) -> RateHistory:
    """The plans of the run's steps. Raises UserError for a damaged record, as all that follow."""
    return RateHistory(_recorded(store, CODECS, CodecPlan.from_json))


def recorded_storages(store: Store) -> StorageHistory:
    """As `recorded_codecs`, of what stages store their activations in."""
    return StorageHistory(_recorded(store, STORAGES, StoragePlan.from_json))


def record_places(store: Store, plan: PlacePlan) -> None:
    """The placement after the newest one is this."""
    with _writing(store) as db:
        newest = "SELECT coalesce(max(epoch), 0) FROM placements"
        values = f"INSERT OR REPLACE INTO decisions VALUES (?, ({newest}), ?)"
        db.execute(values, (PLACES, plan.to_json()))


def recorded_places(store: Store) -> tuple[int, PlacePlan, int] | None:
    """The newest plan behind the epoch that it ends, and how many there are."""
    plans = _recorded(store, PLACES, PlacePlan.from_json)
    return (*plans[-1], len(plans)) if plans else None


def record_splits(store: Store, history: SplitHistory) -> None:
    """These are the splits of the run's steps."""
    with _writing(store) as db:
        db.execute("DELETE FROM decisions WHERE kind = ?", (SPLITS,))
        rows = [(SPLITS, step, json.dumps(split)) for step, split in history.changes]
        db.executemany("INSERT INTO decisions VALUES (?, ?, ?)", rows)


def recorded_splits(store: Store) -> SplitHistory:
    """The splits of the run's steps."""
    return SplitHistory(_recorded(store, SPLITS, lambda text: tuple(map(int, json.loads(text)))))
