"""Runs of an experiment in parts: several GPUs, calls that end after some minutes, results from elsewhere.

A finished run is a file of `parts`: the report's header and the run. A run that a call's end stops leaves its
trainer's state in `checkpoints`, which the next call goes on from, to the same bits.
"""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

LEAST_SECONDS = 60.0
"""No run starts with less time left."""

Report = dict[str, Any]
States = Mapping[str, Mapping[str, Tensor]]


class Parts:
    """Finished runs, a file each."""

    def __init__(self, folder: Path, header: Callable[[], Report] | None) -> None:
        """`header`: of the report that the runs belong to; None to take that of the first file."""
        self._folder, self._header = folder, header

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def put(self, name: str, run: Mapping[str, Any]) -> None:
        assert self._header is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        whole = self._path(name).with_suffix(".tmp")
        whole.write_text(json.dumps({"report": self._header(), "run": run}), encoding="utf-8")
        whole.rename(self._path(name))

    def merged(self, earlier: Report | None, key: Sequence[str]) -> Report | None:
        """One report: an earlier one's runs of the same settings, replaced by files with the same `key`.

        Files of other settings are left out, and named. None if there is nothing.
        """
        report = self._header() if self._header is not None else earlier
        runs = {} if earlier is None else {_key(run, key): run for run in earlier["runs"]}
        if report is not None and earlier is not None and _settings(report) != _settings(earlier):
            print("the report is of other settings: its runs are left out")
            runs = {}
        for path in sorted(self._folder.glob("*.json")):
            part = json.loads(path.read_text(encoding="utf-8"))
            report = report or part["report"]
            if _settings(part["report"]) != _settings(report):
                print(f"{path.name} is of other settings: left out")
                continue
            runs[_key(part["run"], key)] = part["run"]
            # Where it ran, not where files are merged.
            report = {**report, **{name: part["report"][name] for name in ("hardware", "versions")}}
        return None if report is None else {**report, "runs": list(runs.values())}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _key(run: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(run[name] for name in names)


def _settings(report: Report) -> Report:
    """Reports can be merged if this is equal: all but the commit, the machine and the versions."""
    others = ("commit", "hardware", "versions", "runs", "unfinished")
    return {name: value for name, value in json.loads(json.dumps(report)).items() if name not in others}


class Checkpoints:
    """States of trainers, a folder each: a file for each layer unit, and what the caller notes."""

    def __init__(self, folder: Path | None) -> None:
        """None keeps nothing."""
        self._folder = folder

    def save(self, name: str, states: States, noted: Mapping[str, Any]) -> None:
        """Replaces an earlier one of this name only once it is whole."""
        if self._folder is None:
            return
        made = self._folder / f"{name}.{os.getpid()}.tmp"
        made.mkdir(parents=True, exist_ok=True)
        for number, state in enumerate(states.values()):
            save_file({key: one.contiguous() for key, one in state.items()}, made / f"{number}.safetensors")
        (made / "noted.json").write_text(json.dumps({"units": list(states), **noted}), encoding="utf-8")
        self.drop(name)
        try:
            made.rename(self._folder / name)
        except OSError:  # another process has made the same one meanwhile
            shutil.rmtree(made)

    def load(self, name: str) -> tuple[States, dict[str, Any]] | None:
        """The states by unit and what was noted, if there is one."""
        folder = None if self._folder is None else self._folder / name
        if folder is None or not folder.exists():
            return None
        noted = json.loads((folder / "noted.json").read_text(encoding="utf-8"))
        units = noted.pop("units")
        return {unit: load_file(folder / f"{number}.safetensors") for number, unit in enumerate(units)}, noted

    def has(self, name: str) -> bool:
        return self._folder is not None and (self._folder / name).exists()

    def drop(self, name: str) -> None:
        if self.has(name):
            assert self._folder is not None
            shutil.rmtree(self._folder / name)


class Progress:
    """Prints how fast a run is: early, then every `seconds`."""

    _EARLY = (3, 10, 30)

    def __init__(self, name: str, steps: int, tokens_a_step: int, seconds: float = 20.0) -> None:
        self._name, self._steps, self._tokens, self._seconds = name, steps, tokens_a_step, seconds
        self.taken = 0
        """Steps of this call."""
        self._began = self._said = time.monotonic()

    def step(self, done: int, loss: float) -> None:
        """A step has ended, the run's `done`-th."""
        self.taken += 1
        now = time.monotonic()
        if self.taken == 1:  # compiles and captures
            print(f"{self._name}: first step {now - self._began:.1f} s", flush=True)
            self._began = now
            return
        if self.taken in self._EARLY or now - self._said > self._seconds:
            self._said = now
            a_step = (now - self._began) / (self.taken - 1)
            print(
                f"{self._name}: {done}/{self._steps} loss {loss:.4f}, {self._tokens / a_step:,.0f} tokens/s, "
                f"{a_step:.3f} s a step, {(self._steps - done) * a_step:.0f} s left",
                flush=True,
            )


def deal(
    names: Iterable[str],
    finished: Callable[[str], bool],
    command: Sequence[str],
    gpus: Sequence[int],
    until: float,
) -> bool:
    """Run `command --worker NAME` for every name, one at a time on each GPU, until `time.time()` is `until`.

    Returns whether all that ran ended well. Runs that have not begun by then are left for another call.
    """
    left, lock = [name for name in names if not finished(name)], threading.Lock()
    failed: list[str] = []

    def serve(gpu: int) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        while True:
            with lock:
                if not left or time.time() + LEAST_SECONDS > until:
                    return
                name = left.pop(0)
            process = subprocess.run([*command, "--worker", name], env=environment)
            if process.returncode:
                failed.append(name)

    threads = [threading.Thread(target=serve, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in failed:
        print(f"{name}: failed")
    return not failed
