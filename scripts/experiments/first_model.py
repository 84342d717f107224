"""Train a first model on a text, and record what people see: `python -m scripts.experiments.first_model TEXT
--json PATH [--device cuda:0] [KEY=VALUE ...]`.

A coordinator and two machines with names, all on this machine, by the commands that people type: a tokenizer
of the text's own, then a run with held-out points and prompts. PATH has the losses, and what the model
writes. With `--pictures NAME` the run's page is photographed in Chromium while it trains and when it is over,
on a wide screen and on a phone, into NAME_running_1280.png and so on beside PATH.
"""

import argparse
import asyncio
import io
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median
from typing import Any

import torch

from node.lab.results import commit, processor
from node.model.units import unit_parameters
from node.run_file.loader import load_config
from node.schedule.placement import stage_units
from node.telemetry.events import HeldOutLoss, RunFinished, SampleMade, StepDone
from node.telemetry.history import read_history
from scripts.experiments.first_hour import Scene, free_port, wait_for_step
from scripts.report import write
from tests.support.browser import Browser

SCREENS = {"1280": {"width": 1280, "height": 900}, "390": {"width": 390, "height": 844}}
RUN = """
[run]
name = "shakespeare"
steps = 240
snapshot_every = 30

[model]
layers = 4
hidden = 128
heads = 4
kv_heads = 2
ffn = 352
vocab = 1024
sequence = 128

[data]
valid_every = 10
valid_samples = 32
prompts = ["First Citizen:", "My lord, I", "The king"]

[training]
global_batch = 16
microbatch = 4
lr = 3e-3
warmup_steps = 20

[pipeline]
stages = 2
"""
LIMIT_SECONDS = 3600.0
"""For the whole run."""


def thinwire(*words: str) -> str:
    """What a command prints; ends the program with that if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "node.cli.main", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"thinwire {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


async def photograph(address: str, name: Path) -> None:
    """A picture of the page for each screen, in 256 colours."""
    from PIL import Image  # needed for pictures only

    with tempfile.TemporaryDirectory() as profile:
        async with Browser(Path(profile)) as browser:
            for screen, size in SCREENS.items():
                tab = await browser.open(address, **size)
                await tab.wait_for("document.querySelector('#loss-chart .held')")
                await tab.wait_for("document.querySelectorAll('#samples li').length")
                image = Image.open(io.BytesIO(await tab.screenshot(Path(profile) / "page.png")))
                few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
                few.save(name.with_name(f"{name.name}_{screen}.png"), optimize=True)


def train(scene: Scene, args: argparse.Namespace) -> Path:
    """The whole run, photographed where that is wanted; returns its directory."""
    tokenizer, run_file, run = (scene.folder / name for name in ("tokenizer", "run.toml", "run"))
    run_file.write_text(RUN, encoding="utf-8")
    settings = [
        *(f"data.path={args.text.resolve()}", f"data.tokenizer={tokenizer}"),
        *(f"coordinator.listen=127.0.0.1:{free_port()}", *args.settings),
    ]
    config = load_config(run_file, settings)
    thinwire("data", "tokenizer", str(args.text), str(tokenizer), "--vocab", str(config.model.vocab))
    start = ("coordinator", str(run_file), "--run-dir", str(run), "--stay", *settings)
    coordinator = scene.open("operator", *start)
    token = coordinator.wait_for("thinwire join ").split()[-1]
    for name in ("Ana's desktop", "Ben's laptop"):
        scene.open(
            *(name, "join", token, "--name", name, "--listen", "127.0.0.1:0", "--threads", "1"),
            *("--device", args.device, "--state-dir", str(scene.folder / name.split()[0])),
        )
    address = re.findall(r"http://[\d.:]+/", coordinator.wait_for("page at "))[0]
    if args.pictures:
        wait_for_step(coordinator, config.run.steps * 4 // 5, LIMIT_SECONDS)
        asyncio.run(photograph(address, args.json.with_name(f"{args.pictures}_running")))
    if args.seconds:
        stop = threading.Timer(args.seconds, coordinator.process.send_signal, [signal.SIGINT])
        stop.daemon = True
        stop.start()
    coordinator.wait_for("where time went", LIMIT_SECONDS)
    if args.pictures:
        asyncio.run(photograph(address, args.json.with_name(f"{args.pictures}_finished")))
    return run


def record(run: Path, text: Path) -> dict[str, Any]:
    """What came out, from the run's history."""
    told = [entry.event for entry in read_history(run)]
    summary = next(event.summary for event in told if isinstance(event, RunFinished))
    assert summary is not None
    config = load_config(run / "run.toml")
    units = [unit for stage in stage_units(config, config.pipeline.stages) for unit in stage]
    samples = [event for event in told if isinstance(event, SampleMade)]
    return {
        "text": text.name,
        "text_bytes": text.stat().st_size,
        "parameters": sum(unit_parameters(config.model, unit) for unit in units),
        "steps": summary.steps,
        "tokens": summary.tokens,
        "seconds": summary.seconds,
        "step_seconds": median(event.seconds for event in told if isinstance(event, StepDone)),
        "link_bytes": summary.link_bytes,
        "link_bytes_fp32": summary.link_bytes_fp32,
        "loss_last": summary.last_loss,
        "held_out": {event.step: event.uncompressed for event in told if isinstance(event, HeldOutLoss)},
        "samples": [{"step": made.step, "prompt": made.prompt, "text": made.text} for made in samples],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a first model and record what people see.")
    parser.add_argument("text", type=Path, metavar="TEXT", help="a text file")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="other values of the run file")
    parser.add_argument("--json", type=Path, required=True, help="write the record there")
    parser.add_argument("--pictures", metavar="NAME", help="photograph the page, into files of this name")
    parser.add_argument("--seconds", type=float, help="stop by Ctrl-C after this time")
    parser.add_argument("--device", default="cpu", help="of both machines")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        try:
            report = record(train(scene, args), args.text)
        except SystemExit:
            for terminal in scene.terminals:
                print(terminal.typed, *(f"{at:6.1f}  {line}" for at, line in terminal.lines), sep="\n")
            raise
        finally:
            scene.end()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    write(args.json, {**report, "hardware": processor(), "commit": commit(), "runs": 1, **versions})


if __name__ == "__main__":
    main()
