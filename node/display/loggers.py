"""Writes a run's steps to TensorBoard or Weights & Biases, in addition to the history.

Every event with a step and numbers becomes scalars such as `step/loss`, `step/lr`, and `step/idle/0` for
stage 0. A logger that fails during the run is turned off with one warning, and the run continues.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

from node.config.schema import RunConfig
from node.run_file.loader import to_fields
from node.telemetry.events import Event, RunStarted
from wire.errors import UserError

log = logging.getLogger(__name__)

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The package of each logger. Extras with the loggers' names install them."""
FOLDER = "tensorboard"


class TensorBoard:
    """Writes event files into the run's directory."""

    def __init__(self, package: Any, started: RunStarted, config: RunConfig) -> None:
        self._writer = package.SummaryWriter(str(Path(started.directory) / FOLDER))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes to a W&B run with the run's id, in the project of W&B's settings. A resumed run continues it."""

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


Backend = TensorBoard | WeightsAndBiases
BACKENDS: dict[str, Callable[[Any, RunStarted, RunConfig], Backend]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


@contextmanager
def loggers(config: RunConfig) -> Iterator[tuple[Callable[[Event], None], ...]]:
    """The sinks for `[telemetry] loggers`, closed at the end. Raises UserError if a package is missing."""
    with ExitStack() as stack:
        sinks = []
        for name in dict.fromkeys(config.telemetry.loggers):
            sink = Logger(name, _package(name), config)
            stack.callback(sink.close)
            sinks.append(sink)
        yield tuple(sinks)


class Logger:
    """Receives each event. Opens its backend when the run starts."""

    def __init__(self, name: str, package: ModuleType, config: RunConfig) -> None:
        self._name = name
        self._package = package
        self._config = config
        self._backend: Backend | None = None
        self._broken = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted) and self._backend is None:
            self._attempt(lambda: self._open(event))
        step_scalars = scalars(event)
        backend = self._backend
        if step_scalars is not None and backend is not None:
            self._attempt(lambda: backend.write(*step_scalars))

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
        except Exception as error:  # an error in a logger must not end the run
            self._broken = True
            log.warning(
                "%s is turned off: %s", self._name, " ".join(str(error).split()) or type(error).__name__
            )


def scalars(event: Event) -> tuple[int, dict[str, float]] | None:
    """The step and the finite numbers of an event; None without a step or numbers."""
    step = getattr(event, "step", None)
    if not isinstance(step, int):
        return None
    numbers: dict[str, float] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        several = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for index, number in several:
            if type(number) is float and isfinite(number):
                name = f"{event.event}/{field.name}"
                numbers[name if index is None else f"{name}/{index}"] = number
    return (step, numbers) if numbers else None


def _package(name: str) -> ModuleType:
    package = PACKAGES[name]
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f'telemetry.loggers {name!r} needs the {package} package: pip install "thinwire[{name}]"'
        ) from None
