"""What `thinwire config explain` foretells, beside steps that the lab measures: six runs on shaped lines.

    python -m scripts.experiments.explained_steps [--only NAME ...] [--add]

Each machine has one line for all its links (`network.topology = "interfaces"`), as at home. The run file and
`--machine` are those that a user would give: a CPU's row of the table of cards, and the line. Measured are
the median seconds of a step, the bytes that the busiest machine sends in it, headers of TCP/IP left out, and
the most memory that a stage's process had, which sent no snapshot meanwhile. Of several runs, the median of
each figure counts; for seconds only of runs beside which the cores had nothing else to do, if there are any.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from node.lab.results import commit, describe_machine
from node.run_file.loader import toml_value
from node.telemetry.events import StepCosts
from node.telemetry.history import read_history
from scripts.report import RESULTS, ROOT, write
from wire.codecs.registry import codec
from wire.spec import TensorSpec

OUT = RESULTS / "explained_steps.json"
STEPS = 5
"""Measured of each run, after the lab's warm-up."""
QUIET_LOAD = 3.5
"""Load average, at the end of a run, of a machine that does nothing else. None was not recorded, on a machine
that did nothing else."""
SMALL = {
    "family": "llama",
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 704,
    "sequence": 128,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run and the line of each of its machines."""

    name: str
    stages: int
    line: str
    """Mbit/s, UP or UP/DOWN."""
    codecs: tuple[str, str] = ("tah", "fixed-8")
    model: dict[str, Any] = field(default_factory=lambda: SMALL)
    batch: tuple[int, int] = (16, 2)
    """Samples of a step, and of a microbatch."""

    def run_file(self) -> dict[str, dict[str, Any]]:
        whole, microbatch = self.batch
        return {
            "model": dict(self.model),
            "training": {"global_batch": whole, "microbatch": microbatch},
            "pipeline": {"stages": self.stages},
        }


SETTINGS = (
    Setting(name="two stages, 5 Mbit/s", stages=2, line="5"),
    Setting(name="four stages, 2 Mbit/s", stages=4, line="2"),
    Setting(name="three stages, 4 up, 40 down", stages=3, line="4/40", codecs=("tah", "fixed-6")),
    Setting(name="four stages in bf16, 4 Mbit/s", stages=4, line="4", codecs=("bf16", "bf16")),
    Setting(name="two stages of trellis, 3 Mbit/s", stages=2, line="3", codecs=("trellis-4.41", "fixed-8")),
    Setting(
        name="two large stages, 1 Mbit/s",
        stages=2,
        line="1",
        model={**SMALL, "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408},
        batch=(8, 2),
    ),
)


def compile_codecs(setting: Setting) -> None:
    """Into numba's cache: what a process takes while it compiles is foretold by the bound alone."""
    shape = (setting.batch[1], setting.model["sequence"], setting.model["hidden"])
    spec = TensorSpec(torch.float32, shape)
    for name in setting.codecs:
        one = codec(name)
        one.decode(one.encode(torch.linspace(-1, 1, spec.elements).view(shape)), spec)


def toml(sections: dict[str, dict[str, Any]]) -> str:
    return "\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())])
        for name, keys in sections.items()
    )


def thinwire(*arguments: str, where: Path) -> str:
    """Run a command; ends this program with what it said if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "node.cli.main", *arguments],
        cwd=where,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise SystemExit(f"thinwire {arguments[0]} {arguments[1]} failed:\n{done.stdout}")
    return done.stdout


def foretold(setting: Setting, folder: Path) -> dict[str, Any]:
    """What `config explain` says of it."""
    forward, backward = setting.codecs
    sections = setting.run_file()
    sections["pipeline"] |= {"forward_codec": forward, "backward_codec": backward}
    run_file = folder / "run.toml"
    run_file.write_text(toml(sections), encoding="utf-8")
    # The lab's lines have one rate both ways unless they name two.
    up, _, down = setting.line.partition("/")
    machine = f"cpu,{up}/{down or up}"
    whole = json.loads(
        thinwire("config", "explain", str(run_file), "--json", "--machine", machine, where=folder)
    )
    return {
        "seconds": whole["step_seconds"],
        "bytes": max(one["up"] for one in whole["machines"]),
        "memory": whole["expected_memory"],
        "most_memory": whole["most_memory"],
    }


def measured(setting: Setting, folder: Path) -> dict[str, Any]:
    """What the lab measures of it."""
    sections = {
        "lab": {"name": "explained", "steps": STEPS, "unthrottled_steps": 0},
        **setting.run_file(),
        "network": {"topology": "interfaces", "congestion_control": "cubic"},
        "[sweep]": {"rates": [setting.line], "codecs": ["/".join(setting.codecs)]},
    }
    profile, out = folder / "profile.toml", folder / "lab"
    profile.write_text(toml(sections), encoding="utf-8")
    thinwire("lab", "run", str(profile), "--out", str(out), "--no-plots", where=folder)
    (cell,) = json.loads((out / "results.json").read_text())["cells"]
    steps = {number for number, _, _ in cell["curve"][-STEPS:]}
    history = out / "runs" / cell["run"]
    costs = [one.event for one in read_history(history) if isinstance(one.event, StepCosts)]
    counted = [one for one in costs if one.step in steps and not one.aborted]
    sent = [[_sent(one, stage) for stage in range(setting.stages)] for one in counted]
    last = costs[-1].stages
    return {
        "seconds": cell["step_seconds"]["median"],
        "least": cell["step_seconds"]["least"],
        "most": cell["step_seconds"]["most"],
        "bytes": median(max(one) for one in sent),
        "memory": [stage.peak_memory_bytes for stage in last],
        "stage_seconds": cell["stage_seconds"],
        "load": os.getloadavg()[0],
        "commit": commit(),
    }


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several runs of a setting come to."""
    alone = [one for one in runs if one["load"] is None or one["load"] <= QUIET_LOAD]
    quiet = alone or runs
    return {
        "seconds": median(one["seconds"] for one in quiet),
        "least": min(one["least"] for one in quiet),
        "most": max(one["most"] for one in quiet),
        "quiet_runs": len(alone),
        "bytes": median(one["bytes"] for one in runs),
        "memory": [median(stage) for stage in zip(*(one["memory"] for one in runs), strict=True)],
        "most_memory": [max(stage) for stage in zip(*(one["memory"] for one in runs), strict=True)],
    }


def _sent(costs: StepCosts, stage: int) -> int:
    return sum(link.bytes for link in costs.links if link.source == stage)


def off(told: float, found: float) -> float:
    """How far what was told is from what was found, as a share."""
    return told / found - 1


def compare(setting: Setting, runs: Sequence[dict[str, Any]], *, measure: bool) -> dict[str, Any]:
    """`runs`: those of this setting that were measured before and count."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = foretold(setting, folder)
        if measure:
            compile_codecs(setting)
            runs = [*runs, measured(setting, folder)]
    found = together(runs)
    memory = [off(*pair) for pair in zip(told["memory"], found["memory"], strict=True)]
    return {
        "name": setting.name,
        "stages": setting.stages,
        "line": setting.line,
        "codecs": "/".join(setting.codecs),
        "foretold": told,
        "measured": found,
        "off": {
            "seconds": off(told["seconds"], found["seconds"]),
            "bytes": off(told["bytes"], found["bytes"]),
            "memory": max(memory, key=abs),
        },
        "runs": list(runs),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare `config explain` with steps in the lab.")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a setting; repeat it")
    parser.add_argument("--add", action="store_true", help="runs that were measured before count too")
    parser.add_argument(
        "--foretell", action="store_true", help="only foretell, beside what was measured before"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="goes on there: other settings stay")
    arguments = parser.parse_args(argv)
    earlier = json.loads(arguments.out.read_text())["settings"] if arguments.out.exists() else []
    known = {one["name"]: one for one in earlier}
    for setting in SETTINGS:
        if arguments.only and setting.name not in arguments.only:
            continue
        before = known.get(setting.name)
        keeps = before is not None and (arguments.add or arguments.foretell)
        runs = before["runs"] if before is not None and keeps else []
        machine = before["machine"] if before is not None and arguments.foretell else describe_machine()
        one = compare(setting, runs, measure=not arguments.foretell) | {"machine": machine}
        known[setting.name] = one
        print(setting.name, {key: f"{value:+.1%}" for key, value in one["off"].items()}, flush=True)
        ordered = [known[one.name] for one in SETTINGS if one.name in known]
        write(arguments.out, {"experiment": "explained_steps", "steps": STEPS, "settings": ordered})
    return 0


if __name__ == "__main__":
    sys.exit(main())
