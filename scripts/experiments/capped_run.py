"""Runs of large models on small cards: nodes capped in memory that share one GPU, over slow links.

    python -m scripts.experiments.capped_run qwen3-30b-a3b [--kill] [--out PATH]

A coordinator and a node process for each stage, with a join line and mutual TLS. Weights are random. Each
node has its own cap on the GPU's memory (`thinwire join --max-memory`) and is reached through a relay of a
set rate each way (`shaped_relay`). With one GPU, nodes take turns on it: tokens a second are those of one
card.

With `--kill` one node is killed after a snapshot and some more steps, and started again. The run goes back to
the snapshot, and steps that it does again must have the same losses and gradient norms.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from node.config.schema import (
    CoordinatorSection,
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SnapshotsSection,
    StorageSection,
    TrainingSection,
)
from node.lab.results import commit, hardware
from node.telemetry import events
from scripts.experiments.paced_pipeline import NODE, Child, PacedRun, paced_run
from scripts.report import RESULTS, version, write

OUT = RESULTS / "capped_runs.json"
CAP, DEVICE, PEAK = "THINWIRE_CAPPED_GB", "THINWIRE_CAPPED_DEVICE", "peak.json"
"""Environment variables of a node, and the file in its directory with the most memory that it held."""
PEAK_SECONDS = 0.2
STEP_SECONDS = 900.0
KILLED = 1
"""The node, in the order of their coming."""


@dataclass(frozen=True)
class Case:
    """A run, and its cards."""

    model: ModelSection
    stages: int
    cap_gb: float
    samples: int
    """Of a microbatch."""
    microbatches: int
    lora: LoraSection
    storage: StorageSection
    low_state: bool = False
    """All weights are trained, in bf16, with gradients and moments in FP8."""


QWEN3_30B_A3B = ModelSection(
    family="mixture",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_width=128,
    ffn=768,
    experts=128,
    experts_per_token=8,
    qk_norm="head",
    norm_eps=1e-6,
    rope_theta=1e6,
    vocab=151_936,
    sequence=2048,
)
GPT_OSS_20B = ModelSection(
    family="mixture",
    layers=24,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_width=64,
    ffn=2880,
    experts=32,
    experts_per_token=4,
    qkv_bias=True,
    all_biases=True,
    sinks=True,
    swiglu_limit=7.0,
    window=128,
    no_window=tuple(range(1, 24, 2)),
    rope_theta=150_000.0,
    rope_scaling="yarn",
    rope_factor=32.0,
    rope_original=4096,
    rope_truncate=False,
    vocab=201_088,
    sequence=2048,
)
LLAMA_8B = ModelSection(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, rope_theta=5e5, vocab=128_256, sequence=2048
)
NANOGPT = ModelSection(family="gpt2", layers=8, hidden=1024, heads=8, ffn=4096, vocab=50_304, sequence=1024)
"""Of deploy/lab/nanogpt.toml, a public contest's."""
LLAMA_3B = replace(LLAMA_8B, layers=28, hidden=3072, heads=24, ffn=8192, tied=True)
ADAPTERS, PACKED = LoraSection(rank=8, base="4"), StorageSection(preset="compact")
CASES = {
    "qwen3-30b-a3b": Case(QWEN3_30B_A3B, 4, 12, 2, 16, ADAPTERS, PACKED),
    "gpt-oss-20b": Case(GPT_OSS_20B, 4, 8, 2, 8, ADAPTERS, PACKED),
    "llama-8b": Case(LLAMA_8B, 8, 8, 1, 16, LoraSection(), PACKED, low_state=True),
    "llama-3b": Case(LLAMA_3B, 4, 8, 1, 16, LoraSection(), PACKED, low_state=True),
    "nanogpt": Case(NANOGPT, 8, 12, 8, 64, LoraSection(), StorageSection()),
}


def tiny(case: Case) -> Case:
    """The same for a look at the script itself: two small blocks a stage."""
    model = replace(
        case.model,
        layers=2 * case.stages,
        hidden=64,
        heads=4,
        kv_heads=4 if case.model.family == "gpt2" else 2,
        head_width=0,
        ffn=48,
        vocab=256,
        sequence=64,
        no_window=case.model.no_window[: case.stages],
        window=min(case.model.window, 16),
        experts=min(case.model.experts, 8),
        experts_per_token=min(case.model.experts_per_token, 2),
    )
    return replace(case, model=model, samples=1, microbatches=4)


def run_config(case: Case, arguments: argparse.Namespace) -> RunConfig:
    training = TrainingSection(
        global_batch=case.samples * case.microbatches,
        microbatch=case.samples,
        precision="bfloat16",
        warmup_steps=0,
    )
    if case.low_state:
        training = replace(training, weights="bfloat16", gradients="fp8", moments="fp8")
    every = arguments.snapshot_every if arguments.kill else 10**5
    return RunConfig(
        run=RunSection(name="capped", steps=10**5, snapshot_every=every),
        model=case.model,
        training=training,
        storage=case.storage,
        lora=case.lora,
        pipeline=PipelineSection(
            stages=case.stages,
            sequence_chunks=arguments.slices,
            forward_codec=arguments.codecs[0],
            backward_codec=arguments.codecs[1],
        ),
        # On the coordinator two snapshots must fit, which for whole states is more than a card's machine has.
        snapshots=SnapshotsSection(
            keep="nodes" if case.low_state else "coordinator", last_here=not case.low_state
        ),
        coordinator=CoordinatorSection(listen="127.0.0.1:0", silent_seconds=60.0),
    )


class Run:
    """A run's processes and what its coordinator said."""

    def __init__(self, processes: PacedRun, rate: float, delay: float) -> None:
        self.processes, self._rate, self._delay = processes, rate, delay
        self.told: list[Any] = []
        self.token = ""

    async def add_node(self) -> None:
        await self.processes.add_node(self.token)
        self.processes.relays[-1].shape(rate=self._rate * 1e6 / 8, delay=self._delay / 1e3)

    async def until(self, *kinds: type[Any]) -> Any:
        """The next event of these kinds. Raises RuntimeError if a process ends by itself."""
        event = asyncio.ensure_future(self._event(kinds))
        ended = asyncio.ensure_future(self._node_ended())
        try:
            await asyncio.wait({event, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():  # a node ended
                raise RuntimeError(ended.result())
            return event.result()
        finally:
            event.cancel()
            ended.cancel()

    async def _node_ended(self) -> str:
        """The last words of the next node that ends."""
        if not self.processes.relays:
            await asyncio.Future()
        number = await self.processes.node_ended()
        log = node_log(self.processes.directory / f"node-{1 + number}").read_text(errors="replace")
        return f"node {number} ended: {log.strip() or 'it said nothing'}"

    async def _event(self, kinds: tuple[type[Any], ...]) -> Any:
        output = self.processes.coordinator.stdout
        assert output is not None
        async with asyncio.timeout(STEP_SECONDS):
            while line := await output.readline():
                event = events.from_json(line.decode())
                self.told.append(event)
                if isinstance(event, events.Notice | events.StepAborted | events.SeatLost):
                    print(getattr(event, "text", event), flush=True)
                if isinstance(event, kinds):
                    return event
        raise RuntimeError("the coordinator ended")

    async def step(self) -> events.StepDone:
        done: events.StepDone = await self.until(events.StepDone)
        speed = f"{done.seconds:.2f} s, {done.tokens_per_second:,.0f} tokens/s"
        print(f"step {done.step}: {speed}, loss {done.loss}", flush=True)
        return done

    def peaks(self) -> list[dict[str, Any]]:
        """Of each node, in the order of their coming."""
        paths = sorted(self.processes.directory.glob(f"node-*/{PEAK}"), key=lambda path: path.parent.name)
        return [json.loads(path.read_text()) for path in paths]


def node_log(directory: Path) -> Path:
    """What the node of this directory wrote to stderr."""
    return directory.with_suffix(".log")


async def launched(words: Sequence[str], environment: dict[str, str], folder: Path) -> Child:
    """A node with a log."""
    with node_log(Path(words[-1])).open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *words, env=environment, stdout=subprocess.DEVNULL, stderr=log, cwd=folder
        )


Record = Callable[[dict[str, Any]], None]


async def measured(case: Case, arguments: argparse.Namespace, record: Record) -> None:
    """Hand `record` what was found, before a node is killed and after."""
    config = run_config(case, arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        async with paced_run(
            config,
            Path(directory),
            forward=0.0,
            backward=0.0,
            threads=arguments.threads,
            script="scripts.experiments.capped_run",
            launch=launched,
        ) as processes:
            run = Run(processes, arguments.rate, arguments.delay)
            run.token = (await run.until(events.JoinLine)).line.split()[-1]
            for _ in range(case.stages):
                await run.add_node()
            await run.until(events.PlacementMade)
            steps = [await run.step()]
            found: dict[str, Any] = {"seconds_to_first_step": round(time.monotonic() - began, 1)}
            while len(steps) < arguments.steps:
                steps.append(await run.step())
            # The first step compiles and measures.
            rates = [step.tokens_per_second for step in steps[1:]]
            found |= {
                "steps": [asdict(step) for step in steps],
                "tokens_per_second": statistics.median(rates),
                "peaks": run.peaks(),
                "driver_bytes": driver_bytes(),
            }
            placed = [event for event in run.told if isinstance(event, events.PlacementMade)]
            found["placement"] = asdict(placed[-1])
            record(found)
            if arguments.kill:
                record({**found, "kill": await killed(run, steps)})


async def killed(run: Run, before: list[events.StepDone]) -> dict[str, Any]:
    """Kill a node; the steps from then on, until the run is beyond those before."""
    print(f"killing node {KILLED}", flush=True)
    began = time.monotonic()
    await run.processes.restart_node(KILLED)
    again: list[events.StepDone] = []
    while not again or again[-1].step <= before[-1].step:
        again.append(await run.step())
    first = {step.step: (step.loss, step.grad_norm) for step in before}
    compared = [step for step in again if step.step in first]
    return {
        "seconds_to_next_step": round(time.monotonic() - began - sum(step.seconds for step in again[1:]), 1),
        "steps_done_again": [step.step for step in compared],
        "equal": bool(compared) and all((step.loss, step.grad_norm) == first[step.step] for step in compared),
        "losses": [step.loss for step in again],
        "peaks": run.peaks(),
    }


def driver_bytes() -> list[int]:
    """What the driver says that each process holds of the GPU; empty if it does not."""
    words = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        asked = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        return [int(line) << 20 for line in asked.stdout.split()]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description="Run large models on nodes that are capped in memory.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--kill", action="store_true", help="kill a node after the steps; see above")
    parser.add_argument("--steps", type=int, default=4, help="before a node is killed")
    parser.add_argument("--snapshot-every", type=int, default=2, help="with --kill")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of a link each way")
    parser.add_argument("--delay", type=float, default=0.0, help="ms of a link each way")
    parser.add_argument("--slices", type=int, default=1, help="of a sample, by pipeline.sequence_chunks")
    parser.add_argument("--samples", type=int, default=0, help="of a microbatch, if not the case's")
    parser.add_argument("--microbatches", type=int, default=0, help="of a step, if not the case's")
    parser.add_argument("--codecs", nargs=2, default=("trellis-3", "dither-3"))
    parser.add_argument("--threads", type=int, default=2, help="of a node, on the CPU")
    parser.add_argument("--device", default="cuda:0", help="of all nodes")
    parser.add_argument("--tiny", action="store_true", help="a model of a few blocks, to try the script")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    # Handle SIGTERM as Ctrl-C, so that a time limit ends the run's processes too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    case = tiny(CASES[arguments.case]) if arguments.tiny else CASES[arguments.case]
    case = replace(
        case,
        samples=arguments.samples or case.samples,
        microbatches=arguments.microbatches or case.microbatches,
    )
    os.environ[CAP], os.environ[DEVICE] = str(case.cap_gb), arguments.device
    earlier = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    ways: list[dict[str, Any]] = []

    def record(found: dict[str, Any]) -> None:
        ways[:] = [
            {
                "commit": commit(),
                "hardware": gpu_name(arguments.device) or hardware(),
                "versions": {name: version(name) for name in ("torch", "triton")},
                "python": platform.python_version(),
                "case": arguments.case,
                **asdict(case),
                **{key: getattr(arguments, key) for key in ("rate", "delay", "slices", "codecs", "device")},
                **found,
            }
        ]
        write(arguments.out, {"runs": [*earlier, *ways]})

    asyncio.run(measured(case, arguments, record))
    row = ways[0]
    print(f"{row['tokens_per_second']:,.0f} tokens/s; peaks {row['peaks']}; {row.get('kill', '')}")
    return 0 if row.get("kill", {}).get("equal", True) else 1


def gpu_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else ""


def node(token: str, listen: str, advertise: str, directory: str) -> int:
    """`thinwire join` with a cap, which also writes down the most memory that it held."""
    from node.config.join_options import JoinOptions
    from node.processes.node import run_node

    device = os.environ[DEVICE]
    options = JoinOptions(
        listen=listen,
        advertise=advertise,
        state_dir=Path(directory),
        device=device,
        threads=int(os.environ["OMP_NUM_THREADS"]),
        max_memory_gb=float(os.environ[CAP]) if device != "cpu" else 0.0,
        json=True,
    )
    if device != "cpu":
        threading.Thread(target=keep_peak, args=(Path(directory) / PEAK,), daemon=True).start()
    return run_node(token, options)


def keep_peak(path: Path) -> None:
    """The program begins to count anew at times, so the counters are read often."""
    import torch

    most = {"allocated": 0, "reserved": 0}
    while True:
        time.sleep(PEAK_SECONDS)
        if not torch.cuda.is_initialized():
            continue
        now = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        if any(now[key] > most[key] for key in most) and path.parent.exists():
            most = {key: max(now[key], most[key]) for key in most}
            path.write_text(json.dumps(most))


if __name__ == "__main__":
    sys.exit(node(*sys.argv[2:]) if sys.argv[1:2] == [NODE] else main())
