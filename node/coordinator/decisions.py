"""Decisions that were made from measurements, in one table of the run's database. A replay follows them,
whatever is measured then."""

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
"""Kinds of decisions. Each holds from a step on; of places it is the epoch that they end."""


def _recorded(store: Store, kind: str, read: Callable[[str], Decided]) -> tuple[tuple[int, Decided], ...]:
    """All decisions of a kind in the order of steps. Raises UserError for a damaged one."""
    with store.reading() as db:
        rows = db.execute("SELECT at, decision FROM decisions WHERE kind = ? ORDER BY at", (kind,)).fetchall()
    try:
        return tuple((at, read(text)) for at, text in rows)
    except (ConfigError, ValueError, TypeError) as error:
        raise UserError(f"{store.path}: {error}: put back a copy of it") from None


def record_plan(store: Store, record: RecordPlan) -> None:
    """Put a plan on record from its step on, in place of what was on record for later steps."""
    kind = CODECS if isinstance(record.plan, CodecPlan) else STORAGES
    with store.writing() as db:
        db.execute("DELETE FROM decisions WHERE kind = ? AND at >= ?", (kind, record.step))
        db.execute("INSERT INTO decisions VALUES (?, ?, ?)", (kind, record.step, record.plan.to_json()))


def recorded_codecs(store: Store) -> StepHistory[CodecPlan]:
    """The plans of the run's steps. Raises UserError for a damaged record, as all that follow."""
    return StepHistory(_recorded(store, CODECS, CodecPlan.from_json))


def recorded_storages(store: Store) -> StepHistory[StoragePlan]:
    """Like `recorded_codecs`, for the form in which stages store their activations."""
    return StepHistory(_recorded(store, STORAGES, StoragePlan.from_json))


def record_places(store: Store, plan: PlacePlan) -> None:
    """The placement after the newest one is this."""
    with store.writing() as db:
        newest = "SELECT coalesce(max(epoch), 0) FROM placements"
        values = f"INSERT OR REPLACE INTO decisions VALUES (?, ({newest}), ?)"
        db.execute(values, (PLACES, plan.to_json()))


def recorded_places(store: Store) -> tuple[int, PlacePlan, int] | None:
    """The newest plan behind the epoch that it ends, and how many there are."""
    plans = _recorded(store, PLACES, PlacePlan.from_json)
    return (*plans[-1], len(plans)) if plans else None


def record_splits(store: Store, history: StepHistory[tuple[int, ...]]) -> None:
    """These are the splits of the run's steps."""
    with store.writing() as db:
        db.execute("DELETE FROM decisions WHERE kind = ?", (SPLITS,))
        rows = [(SPLITS, step, json.dumps(split)) for step, split in history.changes]
        db.executemany("INSERT INTO decisions VALUES (?, ?, ?)", rows)


def recorded_splits(store: Store) -> StepHistory[tuple[int, ...]]:
    """The splits of the run's steps."""
    return StepHistory(_recorded(store, SPLITS, lambda text: tuple(map(int, json.loads(text)))))
