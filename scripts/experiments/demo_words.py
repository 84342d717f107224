"""Run the demo and let its model write: `python -m scripts.experiments.demo_words --json PATH`.

What the demo prints is recorded whole, and what its last snapshot says after each prompt at temperature 0.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from node.lab.results import commit, processor
from scripts.experiments.first_hour import TOKEN

PROMPTS = ("def __init__(self", "    return ", "import ")
TOKENS = 120


def said(*words: str) -> str:
    """The output of a command. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "node.cli.main", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo and let its model write.")
    parser.add_argument("--json", type=Path, required=True, help="write the recording there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "demo-1")
        began = time.monotonic()
        lines = said("demo", "--run-dir", run).splitlines()
        seconds = time.monotonic() - began
        samples = {
            prompt: said("sample", run, prompt, "--tokens", str(TOKENS), "--temperature", "0")
            for prompt in PROMPTS
        }
    recording = {
        "lines": [TOKEN.sub("tw1_...", line.replace(run, "runs/demo-1")) for line in lines],
        "seconds": round(seconds, 1),
        "samples": samples,
        "hardware": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "runs": 1,
    }
    args.json.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
