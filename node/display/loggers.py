"""Write a run's steps to TensorBoard or Weights & Biases, beside the history.

Every event with a step and numbers becomes scalars: `step/loss`, `step/lr`, `step/idle/0` for stage 0 and the
like. A logger that fails during the run is turned off with one warning; the run goes on.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from node.config.schema import RunConfig
from node.run_file.loader import to_fields
from node.telemetry.events import Event, RunStarted
from wire.errors import UserError

log = logging.getLogger(__name__)

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The package of each logger; extras of the same names install them."""
FOLDER = "tensorboard"


class Backend(Protocol):
    """Where scalars go."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's directory."""

    def __init__(self, package: Any, started: RunStarted, config: RunConfig) -> None:
        self._writer = package.SummaryWriter(str(Path(started.directory) / FOLDER))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the same id in the project that W&B's own settings name; a resumed run continues it."""

    def __init__(self, package: Any, started: RunStarted, config: RunConfig) -> None:
        self._run = package.init(
            id=started.run_id,
            name=started.name,
            dir=started.directory,
            resume="allow",
            config=to_fields(config),
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


BACKENDS: dict[str, Callable[[Any, RunStarted, RunConfig], Backend]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


@contextmanager
def loggers(config: RunConfig) -> Iterator[tuple[Callable[[Event], None], ...]]:
    """The sinks of `[telemetry] loggers`, closed at the end. Raises UserError for a missing package."""
    with ExitStack() as stack:
        sinks = []
        for name in dict.fromkeys(config.telemetry.loggers):
            sink = Logger(name, _package(name), config)
            stack.callback(sink.close)
            sinks.append(sink)
        yield tuple(sinks)


class Logger:
    """Called with each event; opens its backend when the run starts."""

    def __init__(self, name: str, package: ModuleType, config: RunConfig) -> None:
        self._name = name
        self._package = package
        self._config = config
        self._backend: Backend | None = None
        self._broken = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted) and self._backend is None:
            self._attempt(lambda: self._open(event))
        found = scalars(event)
        backend = self._backend
        if found is not None and backend is not None:
            self._attempt(lambda: backend.write(*found))

    def close(self) -> None:
        if self._backend is not None:
            self._attempt(self._backend.close)

    def _open(self, started: RunStarted) -> None:
        self._backend = BACKENDS[self._name](self._package, started, self._config)

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            work()
        except Exception as error:  # whatever a logger raises must not end the run
            self._broken = True
            log.warning(
                "%s is turned off: %s", self._name, " ".join(str(error).split()) or type(error).__name__
            )


def scalars(event: Event) -> tuple[int, dict[str, float]] | None:
    """The step and the finite numbers of an event; None without a step or numbers."""
    step = getattr(event, "step", None)
    if not isinstance(step, int):
        return None
    found: dict[str, float] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        several = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for index, number in several:
            if type(number) is float and isfinite(number):
                name = f"{event.event}/{field.name}"
                found[name if index is None else f"{name}/{index}"] = number
    return (step, found) if found else None


def _package(name: str) -> ModuleType:
    package = PACKAGES[name]
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f'telemetry.loggers {name!r} needs the {package} package: pip install "thinwire[{name}]"'
        ) from None
