"""Changes to a running run: which ones there are, and how `thinwire set` passes them to its coordinator.

`thinwire eval --tasks` passes scores for the run's history in the same way, through a file.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from node.config.schema import RunConfig
from node.run_file.loader import change_config, to_json
from node.telemetry import events
from wire.errors import ProtocolViolationError, UserError
from wire.identity.files import write_private

SETTABLE = (
    *("pipeline", "snapshots", "telemetry.trace", "telemetry.trace_mb"),
    *("data.valid_every", "data.valid_samples", "data.prompts", "data.prompts_every"),
    *("run.steps", "run.tokens", "run.snapshot_every", "run.keep_snapshots", "run.keep_best"),
    *("training.lr", "training.min_lr_ratio", "training.clip"),
    *("training.schedule", "training.decay_steps", "training.decay_tokens"),
)
"""The keys that can change at once: all keys of `thinwire resume` except addresses and the text."""
DECIDED = ("training.precision",)
"""The keys whose `auto` the coordinator decides."""
REQUEST_FILE = "change.json"
SCORES_FILE = "scores-{}.json"
MOST_BYTES = 65_536
LOOK_SECONDS = 0.25


class Changes:
    """The settings with which the run will continue. Call it on the coordinator's event loop."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        emit: Callable[[events.Event], None],
        stop: Callable[[str], None],
    ) -> None:
        """`stop` ends the run after its step and a snapshot. It is called with the reason."""
        self._config = config
        self._directory = directory
        self._emit = emit
        self._stop = stop
        self._wanted: tuple[str, ...] = ()
        self.applied: tuple[str, ...] = ()
        """The settings with which the run continues immediately after this coordinator ends."""

    def ask(self, overrides: Sequence[str]) -> str:
        """After this step and a snapshot, continue with these settings. Returns a line that describes the
        change.

        Raises UserError if they cannot be used.
        """
        wanted = (*self._wanted, *overrides)
        check_change(self._config, wanted)
        self._wanted, what = wanted, f"the run continues with {', '.join(wanted)}"
        self._stop(what)
        return f"after this step and a snapshot {what}"

    def move(self, overrides: Sequence[str], what: str) -> None:
        """After this step and a snapshot, apply a decision: a placement from a recorded plan, or a key of
        `DECIDED`. An operator's change or stop has priority."""
        if not self._wanted:
            self._wanted = tuple(overrides)
            self._emit(events.Notice(text=what))
            self._stop(what)

    def drop(self) -> None:
        """The run will end for good, so drop all changes."""
        self._wanted = ()

    def apply(self, *, over: bool) -> bool:
        """The coordinator ends. Returns whether the run continues at once; not if it is over."""
        self.applied = () if over else self._wanted
        return bool(self.applied)

    async def watch(self) -> None:
        """Handle requests of `thinwire set`, and scores of `thinwire eval`, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if wanted := await asyncio.to_thread(take_request, self._directory):
                    self._emit(events.Notice(text=self.ask(wanted)))
            except UserError as error:
                self._emit(events.Notice(text=str(error)))
            for scores in await asyncio.to_thread(take_scores, self._directory):
                self._emit(scores)


def check_change(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with these overrides. Raises UserError if they cannot be used or change nothing."""
    changed = change_config(config, overrides, SETTABLE)
    if to_json(changed) == to_json(config):
        raise UserError(f"the run already has {' '.join(overrides)}")
    return changed


def ask_for_change(directory: Path, overrides: Sequence[str]) -> None:
    """Leave the overrides for the coordinator of the run in `directory`, which looks for them regularly."""
    write_private(directory / REQUEST_FILE, json.dumps(list(overrides)).encode())


def is_asked_for(directory: Path) -> bool:
    """Whether the coordinator has not taken them yet."""
    return (directory / REQUEST_FILE).exists()


def take_request(directory: Path) -> tuple[str, ...]:
    """The overrides that were left, once; empty if there are none. Raises UserError if they are invalid."""
    path = directory / REQUEST_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES)
        path.unlink()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): nothing was changed") from None
    try:
        wanted = json.loads(raw)
    except (ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, list) or not all(isinstance(key, str) for key in wanted):
        raise UserError(f"{os.fspath(path)} has no list of section.key=value: nothing was changed")
    return tuple(wanted)


def leave_scores(directory: Path, scores: events.TaskScores) -> None:
    """Leave scores for the coordinator of the run in `directory`, which looks for them regularly."""
    write_private(directory / SCORES_FILE.format(os.getpid()), scores.to_json().encode())


def take_scores(directory: Path) -> list[events.TaskScores]:
    """The scores that were left, once. Unreadable ones are removed."""
    left = []
    for path in sorted(directory.glob(SCORES_FILE.format("*"))):
        with contextlib.suppress(OSError, ProtocolViolationError, UnicodeDecodeError):
            with path.open("rb") as file:
                raw = file.read(MOST_BYTES)
            path.unlink()
            if isinstance(scores := events.from_json(raw.decode()), events.TaskScores):
                left.append(scores)
    return left
