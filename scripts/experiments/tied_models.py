"""What a tied model costs over slow links: `python -m scripts.experiments.tied_models [--runs N]`.

The laboratory (`node.lab`) runs a profile untied, tied with the head on the first stage, and tied with the
head on the last stage, which sends the weight's gradient both ways. They take turns. Per run and rate it
records the median seconds of a step, and what each stage's compute thread did in it. On one GPU, and on four
with a stage on each, without the last way:

    python -m scripts.experiments.tied_models --profile deploy/lab/tied-124m.toml --ways 2 --runs 3 \\
        --out scripts/results/tied_models_124m.json
    python -m scripts.experiments.tied_models --profile deploy/lab/tied-124m.toml --ways 2 --runs 3 \\
        --gpus 4 --out scripts/results/tied_models_124m_4gpu.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from node.lab.profile import load_profile
from node.lab.results import RESULTS_FILE, commit, hardware
from node.telemetry import events
from node.view.explain import explain
from scripts.report import RESULTS

OUT = RESULTS / "tied_models.json"
PROFILE = Path("deploy/lab/tied-cpu.toml")
UNSHAPED = "no limit"
WAYS = {
    "untied": ("model.tied=false",),
    "tied, head on the first stage": ("pipeline.head=first",),
    "tied, head on the last stage": ("pipeline.head=last",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a tied model with its head on either stage.")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--ways", type=int, default=len(WAYS), help="only so many of the ways, in order")
    parser.add_argument("--gpus", type=int, help="of which stages take turns; default: the profile's")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    shared = () if arguments.gpus is None else (f"lab.gpus={arguments.gpus}",)
    profile, ways = arguments.profile, dict(list(WAYS.items())[: arguments.ways])
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(arguments.runs):
        for way, overrides in ways.items():
            found[way].append(lab(profile, (*overrides, *shared)))
            print(way, seconds(found[way][-1]), flush=True)
    section = load_profile(profile, shared).lab
    report = {
        "experiment": "tied_models",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if section.device == "cuda" else hardware(),
        "gpus": section.gpus if section.device == "cuda" else 0,
        "versions": found["untied"][0]["machine"]["versions"],
        "profile": profile.name,
        "runs": arguments.runs,
        "ways": [
            {
                "way": way,
                "busiest_bytes": busiest_bytes(profile, ways[way]),
                "step_seconds": {
                    rate: statistics.median(seconds(one)[rate] for one in runs) for rate in seconds(runs[0])
                },
                "all_step_seconds": [seconds(one) for one in runs],
                "stage_seconds": {
                    rate: [
                        {
                            kind: statistics.median(one["stages"][rate][stage][kind] for one in runs)
                            for kind in of_stage
                        }
                        for stage, of_stage in enumerate(runs[0]["stages"][rate])
                    ]
                    for rate in runs[0]["stages"]
                },
            }
            for way, runs in found.items()
        ],
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def lab(profile: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The laboratory's results for the profile with these overrides."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "node.cli.main", "lab", "run", str(profile), *overrides]
        subprocess.run([*command, "--out", folder, "--no-plots"], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(Path(folder, RESULTS_FILE).read_text(encoding="utf-8"))
        return {**found, "stages": stage_seconds(Path(folder))}


def stage_seconds(folder: Path) -> dict[str, list[dict[str, float]]]:
    """By the links' Mbit/s, of each stage: seconds a step by what its compute thread did, median of the
    measured steps."""
    steps: dict[str, list[events.StepCosts]] = {}
    for path in sorted(folder.glob("raw/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            noted = json.loads(line)
            event = events.from_json(line)
            if noted["kind"] == "measured" and isinstance(event, events.StepCosts):
                steps.setdefault(noted["shape"] or UNSHAPED, []).append(event)
    return {
        rate: [
            {kind: statistics.median(one.stages[at].seconds[kind] for one in costs) for kind in stage.seconds}
            for at, stage in enumerate(costs[0].stages)
        ]
        for rate, costs in steps.items()
    }


def seconds(results: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step by the links' Mbit/s, and without a limit."""
    times = {UNSHAPED: results["runs"][0]["unthrottled"]["step_seconds"]}
    return times | {cell["key"]["shape"]: cell["step_seconds"]["median"] for cell in results["cells"]}


def busiest_bytes(profile: Path, overrides: tuple[str, ...]) -> int:
    """Bytes a step over the busiest direction of a link, as `thinwire config explain` foretells them."""
    busiest = explain(load_profile(profile, overrides).config).busiest
    assert busiest is not None, "the profile has several stages"
    return busiest.bytes


if __name__ == "__main__":
    sys.exit(main())
