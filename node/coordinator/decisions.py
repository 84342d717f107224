"""Decisions that were made from measurements, in the run's database: a replay follows them, whatever is
measured then.
"""

from node.coordinator.database import has_table
from node.coordinator.store import Store
from node.pipeline.codec_plan import CodecPlan, RateHistory
from node.run_state.actions import RecordCodecs
from wire.errors import ConfigError, UserError

# Runs of an earlier version have no such table.
_CODECS = """CREATE TABLE IF NOT EXISTS codec_plans (
    step INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, plan TEXT NOT NULL)"""


def record_codecs(store: Store, record: RecordCodecs) -> None:
    """From its step on the run has this plan, in place of what was on record for later steps."""
    with store.writing() as db:
        db.execute(_CODECS)
        db.execute("DELETE FROM codec_plans WHERE step >= ?", (record.step,))
        values = record.step, record.epoch, record.plan.to_json()
        db.execute("INSERT INTO codec_plans VALUES (?, ?, ?)", values)


def recorded_codecs(store: Store) -> RateHistory:
    """The plans of the run's steps. Raises UserError for a damaged record."""
    with store.reading() as db:
        if not has_table(db, "codec_plans"):
            return RateHistory()
        rows = db.execute("SELECT step, plan FROM codec_plans ORDER BY step").fetchall()
    try:
        return RateHistory(tuple((step, CodecPlan.from_json(plan)) for step, plan in rows))
    except ConfigError as error:
        raise UserError(f"{store.path}: {error}: put back a copy of it") from None
