"""`results.json`: everything that a lab measured, and on which machine. It is rewritten after every cell."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from node.data.text import write_whole
from node.lab.plan import CellKey, plan_runs
from node.lab.profile import Profile
from wire.errors import UserError
from wire.version import VERSION

RESULTS_FILE = "results.json"
FORMAT = "thinwire-lab-1"
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA's, WSL's and AMD's drivers."""
_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = ("kernels", "wire", "node", "scripts/*.py")


class Results:
    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def new(
        cls,
        path: Path,
        profile: Profile,
        machine: Mapping[str, Any],
        network: Mapping[str, Any],
        only: Sequence[str] = (),
    ) -> "Results":
        """Results without cells. `only` is as for `node.lab.plan.plan_runs`."""
        model, training = profile.config.model, profile.config.training
        values: dict[str, Any] = {
            "format": FORMAT,
            "profile": profile.lab.name,
            "profile_file": profile.file,
            "overrides": list(profile.overrides),
            "only": list(only),
            "planned_cells": sum(len(run.cells) for run in plan_runs(profile)),
            "profile_sha256": profile.sha256,
            "machine": dict(machine),
            "network": dict(network),
            "model": asdict(model),
            "training": asdict(training),
            "text": _text_name(profile),
            "stages": profile.config.pipeline.stages,
            "device": profile.lab.device,
            "seeds": list(profile.lab.seeds),
            "warmup_steps": profile.lab.warmup_steps,
            "warmup_round_trips": profile.lab.warmup_round_trips,
            "finished": False,
            "calibrations": [],
            "runs": [],
            "cells": [],
        }
        return cls(path, values)

    @classmethod
    def go_on(
        cls, path: Path, profile: Profile, machine: Mapping[str, Any], only: Sequence[str] = ()
    ) -> "Results":
        """Continue the results at `path`, and add `only` to the cells requested before.

        Raises UserError if they come from another profile, machine or commit.
        """
        values = read_results(path)
        if values["profile_sha256"] != profile.sha256:
            raise UserError(
                f"{path} was measured with another version of this profile: their results cannot be "
                "combined; give another --out"
            )
        if other := differing(values["machine"], machine):
            raise UserError(
                f"{path} was measured elsewhere (its {', '.join(other)} differ): their results cannot be "
                "combined; give another --out"
            )
        # Older results do not record which cells were requested.
        if "only" in values:
            values["only"] = joined_only([values["only"], only])
        return cls(path, values)

    @property
    def done(self) -> set[CellKey]:
        return {CellKey(**cell["key"]) for cell in self.values["cells"]}

    def write(self) -> None:
        """Replace the file atomically, so that no reader or later lab sees half of it."""
        write_whole(self.path, json.dumps(self.values, indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file, or the one in an output directory. Raises UserError for anything else."""
    try:
        if path.is_dir():
            path /= RESULTS_FILE
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such results file; `thinwire lab run` writes one") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read as results: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as results: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(f"{path} holds no laboratory results of this version ({FORMAT})")
    return values


def joined_only(asked: Sequence[Sequence[str]]) -> list[str]:
    """The cells that several invocations requested, without repetition. Empty means all."""
    if not all(asked):
        return []
    return list(dict.fromkeys(words for cells in asked for words in cells))


def differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys whose values differ."""
    return tuple(sorted(key for key in {**first, **other} if first.get(key) != other.get(key)))


def describe_machine() -> dict[str, Any]:
    """Kernel, hardware, versions and commit, on which figures depend."""
    return {
        "commit": commit(),
        "kernel": platform.release(),
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "gpus": _gpus(),
        "versions": {
            "thinwire": VERSION,
            "python": platform.python_version(),
            "torch": version("torch"),
            "grpcio": version("grpcio"),
            "iproute2": _words("ip", "-V"),
        },
    }


def _gpus() -> list[str]:
    """The names of the GPUs that torch sees. Importing torch takes seconds, so it happens only if there is a
    driver."""
    if not any(Path(driver).exists() for driver in DRIVERS):
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _text_name(profile: Profile) -> str:
    """The text's file name without this machine's folders, and how much of it is read."""
    size = profile.lab.text_bytes
    return Path(profile.config.data.path).name + (f", the first {size} bytes" if size else "")


def processor() -> str:
    """The processor's model name, without padding."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.machine()


def hardware() -> str:
    """Processor and cores of this machine."""
    return f"{processor()}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of this program, marked if the files differ from it. THINWIRE_COMMIT overrides it."""
    if given := os.environ.get("THINWIRE_COMMIT"):
        return given
    # An installed program may lie in the repository of another project.
    head = _words("git", "-C", str(_ROOT), "rev-parse", "HEAD") if (_ROOT / ".git").exists() else ""
    if not head:
        return "unknown"
    changed = _words("git", "-C", str(_ROOT), "status", "--porcelain", "--", *_PROGRAM)
    return head + (" with changes" if changed else "")


def _words(*command: str) -> str:
    """A command's output, or an empty string if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
