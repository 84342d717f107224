"""How long a run waits for state: from the last join to the first step, and for the last snapshot.

    python -m scripts.bench.state_rates [--device cuda] [--layers 16] [--hidden 2048] [--vocab 50304]

A coordinator and four nodes on this machine, over loopback, start from a checkpoint of random weights on its
disk. One snapshot is taken beside the steps, and one at the end. What nodes do before the first step's end is
as they say it. Memory is that of a node's process, or the coordinator's, in what is no file's; processor
seconds are those of all processes. Writes scripts/results/state_rates.json, or FILE.

`--before TREE` runs the same with the program of another tree first, under "before".
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
from safetensors.torch import save_file

from node import program
from node.lab.results import commit, hardware
from scripts.report import RESULTS, write

NODES = 4
LOOK_SECONDS = 0.1
LEAST_STEPS = 6
"""Three of them beside a snapshot, and three before it; of a shorter run only its begin and its end count."""
MOST_SECONDS = 600.0
COMMAND = program("cli.main")
SHOWN = ("node-joined", "placement", "step", "step-aborted", "snapshot", "model", "notice", "run-finished")


def main() -> int:
    # A time limit from outside must leave no process behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description="Measure how long a run waits for state.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--keep", default="coordinator", help="as snapshots.keep")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another tree to measure first")
    parser.add_argument("--out", type=Path, default=RESULTS / "state_rates.json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thinwire-state-") as folder:
        root = Path(folder)
        write_checkpoint(root / "model", args)
        print("the checkpoint is written", flush=True)
        trees = {"before": args.before.absolute()} if args.before else {}
        before = {name: run(root / name, root / "model", args, tree) for name, tree in trees.items()}
        found = run(root / "run", root / "model", args, Path.cwd())
    report = {
        "bench": "state_rates",
        "commit": commit(),
        "hardware": hardware() if args.device == "cpu" else torch.cuda.get_device_name(0),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "runs": 1,
        "nodes": NODES,
        "layers": args.layers,
        "hidden": args.hidden,
        "vocab": args.vocab,
        "keep": args.keep,
        **found,
        **before,
    }
    write(args.out, report)
    print(json.dumps(report, indent=1))
    return 0


def write_checkpoint(folder: Path, args: argparse.Namespace) -> None:
    """A Llama with tied embeddings of random weights, as transformers saves one."""
    folder.mkdir()
    layers, hidden, vocab = args.layers, args.hidden, args.vocab
    heads = hidden // 64
    kv_heads, ffn = max(1, heads // 4), 4 * hidden
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (kv_heads * 64, hidden),
            f"{at}.self_attn.v_proj.weight": (kv_heads * 64, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }

    def weight(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (0.02 * torch.randn(shape, device=args.device)).to("cpu", torch.bfloat16)

    save_file({name: weight(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


RUN_FILE = """
[run]
name = "state"
steps = {steps}
snapshot_every = {every}
[model]
from = "{model}"
sequence = {sequence}
[data]
path = "{root}/text.txt"
tokenizer = "bytes"
[training]
global_batch = {batch}
microbatch = 2
precision = "{precision}"
[pipeline]
stages = {nodes}
[snapshots]
keep = "{keep}"
[coordinator]
listen = "127.0.0.1:0"
"""


def run(root: Path, model: Path, args: argparse.Namespace, tree: Path) -> dict[str, Any]:
    """What the run's events and its nodes' memory show, with the program of this tree."""
    root.mkdir()
    (root / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20000, encoding="utf-8")
    values = {
        "steps": args.steps,
        "every": max(1, args.steps // 2),
        "sequence": args.sequence,
        "keep": args.keep,
    }
    values |= {"model": model, "batch": args.batch}
    precision = "float32" if args.device == "cpu" else "bfloat16"
    text = RUN_FILE.format(root=root, nodes=NODES, precision=precision, **values)
    (root / "run.toml").write_text(text, encoding="utf-8")
    events: Queue[tuple[float, dict[str, Any]]] = Queue()
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    log = (root / "log").open("wb")
    children = [
        subprocess.Popen(
            [*COMMAND, "coordinator", str(root / "run.toml"), "--run-dir", str(root / "run"), "--json"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=tree,
            env=environment,
        )
    ]

    def listen() -> None:
        assert children[0].stdout is not None
        for line in children[0].stdout:
            events.put((time.monotonic(), json.loads(line)))

    threading.Thread(target=listen, daemon=True).start()
    memory: dict[int, list[tuple[float, int]]] = {}
    spent: list[tuple[float, float]] = []
    seen: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    began = time.monotonic()
    ends = began + MOST_SECONDS
    try:
        while "run-finished" not in seen:
            if time.monotonic() > ends or children[0].poll() is not None:
                raise SystemExit((root / "log").read_text(encoding="utf-8"))
            try:
                at, event = events.get(timeout=LOOK_SECONDS)
            except Empty:
                pass
            else:
                seen.setdefault(event["event"], []).append((at, event))
                if event["event"] in SHOWN:
                    why = event.get("reason", event.get("text", ""))
                    print(f"{at - began:.1f} s: {event['event']} {event.get('step', '')} {why}", flush=True)
                if event["event"] == "join-line":
                    children += [
                        _join(root, event["line"].split()[-1], args, number, environment)
                        for number in range(NODES)
                    ]
            for child in children:
                memory.setdefault(child.pid, []).append((time.monotonic(), _anonymous_bytes(child.pid)))
            spent.append((time.monotonic(), sum(_processor_seconds(child.pid) for child in children)))
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(30)
        log.close()
    return _found(seen, list(memory.values()), spent, args.steps) | {"waits": _waits(root)}


def _join(
    root: Path, token: str, args: argparse.Namespace, number: int, environment: dict[str, str]
) -> "subprocess.Popen[str]":
    threads = max(1, (os.cpu_count() or 1) // NODES)
    options = ["--listen", "127.0.0.1:0", "--device", args.device, "--wait", "0", "--threads", str(threads)]
    state = ["--state-dir", str(root / f"node-{number}")]
    with (root / f"node-{number}.log").open("wb") as log:
        return subprocess.Popen(
            [*COMMAND, "join", token, *options, *state],
            stdout=log,
            stderr=log,
            text=True,
            cwd=environment["PYTHONPATH"],
            env=environment,
        )


def _waits(root: Path) -> list[str]:
    """What each node said of the time before its first step's end."""
    logs = [root / f"node-{number}.log" for number in range(NODES)]
    lines = [line for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "the first step ended" in line]


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _found(
    seen: dict[str, list[tuple[float, dict[str, Any]]]],
    memory: list[list[tuple[float, int]]],
    spent: list[tuple[float, float]],
    steps: int,
) -> dict[str, Any]:
    joined, placed = seen["node-joined"][-1][0], seen["placement"][0][0]
    done = {event["step"]: (at, event["seconds"]) for at, event in seen["step"]}
    stored = {event["step"]: (at, event["bytes"]) for at, event in seen["snapshot"]}
    last_step, (last, size) = done[steps][0], stored[steps]

    coordinator, *nodes = memory

    def most(processes: list[list[tuple[float, int]]], first: float, end: float) -> int:
        """By how much a process's memory grew, at most."""
        grown = []
        for samples in processes:
            before = [size for at, size in samples if at <= first][-10:]
            within = [size for at, size in samples if first < at <= end]
            grown.append(max(within, default=0) - max(before, default=0))
        return max(grown)

    def processor(first: float, end: float) -> float:
        """Seconds of all processes."""
        return max(total for at, total in spent if at <= end) - max(
            (total for at, total in spent if at <= first), default=0.0
        )

    found = {
        "join_to_placement_seconds": placed - joined,
        "join_to_placement_processor_seconds": processor(joined, placed),
        "last_snapshot_processor_seconds": processor(last_step, last),
        "join_to_first_step_end_seconds": done[1][0] - joined,
        "join_to_first_step_seconds": done[1][0] - done[1][1] - joined,
        "first_step_seconds": done[1][1],
        "last_snapshot_seconds": last - last_step,
        "last_snapshot_bytes": size,
        "last_snapshot_mb_a_second": size / (last - last_step) / 1e6,
        "grown_bytes_at_the_last_snapshot": most(nodes, last_step, last),
        "coordinator_grown_mb": most([coordinator], last_step, last) / 1e6,
    }
    if "model" in seen:  # trees before it hand in weights and moments together
        found["last_model_seconds"] = seen["model"][-1][0] - last_step
    if steps < LEAST_STEPS:
        return found
    middle = steps // 2
    beside = [done[step][1] for step in range(middle + 1, middle + 4)]
    plain = [done[step][1] for step in range(middle - 2, middle + 1)]
    return found | {
        "middle_snapshot_seconds": stored[middle][0] - done[middle][0] if middle in stored else 0.0,
        "step_seconds": sorted(plain)[1],
        "step_seconds_beside_a_snapshot": sorted(beside)[1],
        "grown_bytes_beside_a_snapshot": most(nodes, done[middle][0], done[middle + 3][0]),
    }


if __name__ == "__main__":
    sys.exit(main())
