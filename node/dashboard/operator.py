"""What the operator may do to a run from its page. Each is what a command does too."""

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from node.coordinator.store import Store
from node.telemetry import events
from wire.errors import UserError

ACTIONS = ("snapshot", "stop", "evict", "revoke", "tokens")


class Controls(Protocol):
    """What is used of `node.coordinator.coordinator.Coordinator`."""

    def stop(self, reason: str) -> None: ...

    def save(self) -> None: ...


class Operator:
    """Carries out what the page asks for; who may ask is checked before (`node.dashboard.access.Gate`)."""

    def __init__(self, controls: Controls, store: Store, emit: Callable[[events.Event], None]) -> None:
        self._controls = controls
        self._store = store
        self._emit = emit

    async def act(self, action: str, subject: str) -> Mapping[str, Any]:
        """Do it and say what was done: `text`, or `tokens` when they were asked for.

        Args:
            action: one of `ACTIONS`.
            subject: the node's or the token's id for `evict` and `revoke`.

        Raises UserError for what cannot be done.
        """
        match action:
            case "snapshot":
                self._controls.save()
                return self._done("a snapshot follows this step")
            case "stop":
                self._controls.stop("stopped by the operator")
                return self._done(
                    "the run stops once its steps are in a snapshot; `thinwire resume` goes on with it"
                )
            case "evict":
                if not await asyncio.to_thread(self._store.evict, subject, time.time()):
                    raise UserError(f"{subject[:40]} is no member of this run")
                return self._done(f"{subject} is evicted: it gets no stage and no certificate any more")
            case "revoke":
                if not await asyncio.to_thread(self._store.revoke_token, subject):
                    raise UserError(f"there is no token {subject[:40]}")
                return self._done(f"token {subject} is revoked; nodes that it admitted stay")
            case "tokens":
                return {"tokens": await asyncio.to_thread(self._tokens)}
            case _:
                raise UserError(f"unknown action {action[:40]!r}; known: {', '.join(ACTIONS)}")

    def _done(self, text: str) -> Mapping[str, str]:
        self._emit(events.Notice(text=f"from the page: {text}"))
        return {"text": text}

    def _tokens(self) -> list[dict[str, Any]]:
        """Without their secrets, which nobody holds."""
        now = time.time()
        return [
            {
                "id": record.token_id,
                "uses": record.uses,
                "uses_allowed": record.uses_allowed,
                "expires": datetime.fromtimestamp(record.expires, UTC).isoformat(timespec="minutes"),
                "usable": not record.revoked and now < record.expires and record.uses < record.uses_allowed,
            }
            for record in self._store.list_tokens()
        ]
