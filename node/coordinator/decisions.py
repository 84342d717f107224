"""Decisions based on measurements, in a table of the run's database. A replay follows them, whatever it
measures."""

import json
from collections.abc import Callable
from typing import TypeVar

from node.coordinator.store import Store
from node.run_state.actions import RecordPlan
from node.tuning.codec_plan import CodecPlan
from node.tuning.decisions import StepHistory
from node.tuning.places import PlacePlan
from node.tuning.storage_choice import StoragePlan
from wire.errors import ConfigError, UserError

Decided = TypeVar("Decided")

CODECS, STORAGES, PLACES, SPLITS = "codecs", "storages", "places", "splits"
"""The kinds of decisions. Each is valid from a step on; for places, the number is the epoch that they end."""


def _recorded(store: Store, kind: str, read: Callable[[str], Decided]) -> tuple[tuple[int, Decided], ...]:
    """All decisions of a kind in the order of steps. Raises UserError for a damaged record."""
    with store.reading() as db:
        rows = db.execute("SELECT at, decision FROM decisions WHERE kind = ? ORDER BY at", (kind,)).fetchall()
    try:
        return tuple((at, read(text)) for at, text in rows)
    except (ConfigError, ValueError, TypeError) as error:
        raise UserError(f"{store.path}: {error}: put back a copy of it") from None


def record_plan(store: Store, record: RecordPlan) -> None:
    """Record a plan from its step on. It replaces all plans for later steps."""
    kind = CODECS if isinstance(record.plan, CodecPlan) else STORAGES
    with store.writing() as db:
        db.execute("DELETE FROM decisions WHERE kind = ? AND at >= ?", (kind, record.step))
        db.execute("INSERT INTO decisions VALUES (?, ?, ?)", (kind, record.step, record.plan.to_json()))


def recorded_codecs(store: Store) -> StepHistory[CodecPlan]:
    """The plans of the run's steps. Raises UserError for a damaged record, as do the functions below."""
    return StepHistory(_recorded(store, CODECS, CodecPlan.from_json))


def recorded_storages(store: Store) -> StepHistory[StoragePlan]:
    """Like `recorded_codecs`, for the storage of activations."""
    return StepHistory(_recorded(store, STORAGES, StoragePlan.from_json))


def record_places(store: Store, plan: PlacePlan) -> None:
    """Record the placement that follows the newest one."""
    with store.writing() as db:
        newest = "SELECT coalesce(max(epoch), 0) FROM placements"
        values = f"INSERT OR REPLACE INTO decisions VALUES (?, ({newest}), ?)"
        db.execute(values, (PLACES, plan.to_json()))


def recorded_places(store: Store) -> tuple[int, PlacePlan, int] | None:
    """The epoch that the newest plan ends, the plan, and the number of plans."""
    plans = _recorded(store, PLACES, PlacePlan.from_json)
    return (*plans[-1], len(plans)) if plans else None


def record_splits(store: Store, history: StepHistory[tuple[int, ...]]) -> None:
    with store.writing() as db:
        db.execute("DELETE FROM decisions WHERE kind = ?", (SPLITS,))
        rows = [(SPLITS, step, json.dumps(split)) for step, split in history.changes]
        db.executemany("INSERT INTO decisions VALUES (?, ?, ?)", rows)


def recorded_splits(store: Store) -> StepHistory[tuple[int, ...]]:
    return StepHistory(_recorded(store, SPLITS, lambda text: tuple(map(int, json.loads(text)))))
