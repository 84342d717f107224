"""What a tied model costs over slow links: `python -m scripts.experiments.tied_models [--runs N]`.

The laboratory (`node.lab`) runs a profile untied, tied with the head on the first stage, and tied with the
head on the last stage, which sends the weight's gradient both ways. They take turns. Per run and rate it
records the median seconds of a step. On a GPU, without the last way:

    python -m scripts.experiments.tied_models --profile deploy/lab/tied-124m.toml --ways 2 \\
        --out scripts/results/tied_models_124m.json
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

from node.analysis.explain import explain
from node.lab.profile import load_profile
from node.lab.results import RESULTS_FILE, commit, hardware
from scripts.report import RESULTS

OUT = RESULTS / "tied_models.json"
PROFILE = Path("deploy/lab/tied-cpu.toml")
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
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    profile, ways = arguments.profile, dict(list(WAYS.items())[: arguments.ways])
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(arguments.runs):
        for way, overrides in ways.items():
            found[way].append(lab(profile, overrides))
            print(way, seconds(found[way][-1]), flush=True)
    report = {
        "experiment": "tied_models",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name()
        if load_profile(profile, ()).lab.device == "cuda"
        else hardware(),
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
        return found


def seconds(results: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step by the links' Mbit/s, and without a limit."""
    times = {"no limit": results["runs"][0]["unthrottled"]["step_seconds"]}
    return times | {cell["key"]["shape"]: cell["step_seconds"]["median"] for cell in results["cells"]}


def busiest_bytes(profile: Path, overrides: tuple[str, ...]) -> int:
    """Bytes a step over the busiest direction of a link, as `thinwire config explain` foretells them."""
    busiest = explain(load_profile(profile, overrides).config).busiest
    assert busiest is not None, "the profile has several stages"
    return busiest.bytes


if __name__ == "__main__":
    sys.exit(main())
