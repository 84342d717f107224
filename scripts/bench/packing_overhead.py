"""What packing costs a pipeline stage, on this GPU: `python -m scripts.bench.packing_overhead --out PATH`.

A middle stage of a Llama of 24 layers in 4 stages, microbatch 2, sequence 4096, hidden 2048, bf16 autocast:
for every microbatch it computes 6 blocks forward and backward, decodes and encodes one activation (`tah`) and
one gradient (`fixed-b`). The kernels are timed twice: in CUDA graphs over several tensors in turn, which is
the time that the device needs, and through the wire's codecs, header and checks and the host's wait included.
Boundaries are float32, as a stage's are under autocast, and bf16.

It also times both together: the stage computes microbatches as a node does, by CUDA graphs in a fixed order
of sums, while another thread packs and unpacks during each microbatch on its own stream. This alternates with
the stage alone. The difference is the cost of packing.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.lab.results import commit
from node.stage.machine_info import fix_order
from node.stage.stage_model import StageModel
from scripts.bench.gpu_timing import eager_seconds, graph_seconds
from scripts.checks.gpu_kernels import calls, sample
from wire.codecs.registry import codec
from wire.spec import TensorSpec

STAGES = 4
MODEL = ModelSection(
    layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5504, vocab=32000, sequence=4096, family="llama"
)
SHAPE = (2, MODEL.sequence, MODEL.hidden)
FORWARD = "tah"
BACKWARD = ("fixed-6", "fixed-8")
TENSORS = 6
TOGETHER = (
    ("tah", "fixed-6"),
    ("tah", "fixed-8"),
    ("trellis-4.41", "fixed-8"),
    ("trellis-4.41", "trellis-4.41"),
)
MICROBATCHES = 8
"""Of each turn of the stage beside packing."""


class Stage:
    """A middle stage, as a node runs it."""

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        fix_order(device)
        training = TrainingSection(
            global_batch=MICROBATCHES * SHAPE[0], microbatch=SHAPE[0], precision="bfloat16"
        )
        config = RunConfig(model=MODEL, training=training, pipeline=PipelineSection(stages=STAGES))
        self._model = StageModel(config, device)
        self._model.build(1, STAGES)
        self._fed, self._gradient = sample(SHAPE, 1), sample(SHAPE, 2)
        # The first step runs through autograd, the second is captured.
        for _ in range(2):
            self.begin()
            self.microbatch(0)

    def begin(self) -> None:
        self._model.begin_step()

    def microbatch(self, number: int) -> None:
        """Forward and backward."""
        self._model.forward(0, number, self._fed.clone())
        self._model.backward(0, number, self._gradient)


def event_seconds(work: Callable[[], Any], runs: int) -> list[float]:
    """Seconds on the device of each of `runs` calls, after three more."""
    for _ in range(3):
        work()
    taken = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return taken


def packing_seconds(name: str, dtype: torch.dtype, runs: int) -> dict[str, float]:
    """Seconds of encoding and of decoding one boundary tensor, by graph and through the wire's codec."""
    tensors = [sample(SHAPE, seed).to(dtype) for seed in range(TENSORS)]
    made = [calls(name, x) for x in tensors]
    which, spec = codec(name), TensorSpec(dtype, SHAPE)
    packed = which.encode(tensors[0])
    return {
        "encode": statistics.median(graph_seconds([steps[0] for steps, _, _ in made], runs)),
        "decode": statistics.median(graph_seconds([steps[1] for steps, _, _ in made], runs)),
        "encode_wall": eager_seconds(lambda: which.encode(tensors[0]), runs),
        "decode_wall": eager_seconds(lambda: which.decode(packed, spec), runs),
    }


def packing_work(names: tuple[str, str]) -> Callable[[], None]:
    """Packs and unpacks a tensor by each codec, on the calling thread's stream; bytes stay on the device."""
    steps: list[Callable[[], object]] = []
    for seed, name in enumerate(names):
        which, tensor = codec(name), sample(SHAPE, seed).float()
        spec = TensorSpec(tensor.dtype, SHAPE)
        sent = which.encode(tensor)
        header, arrived = which.open(sent.cpu().numpy(), spec), sent.cuda()
        steps.append(partial(which.pack, tensor))
        steps.append(partial(which.unpack, arrived, spec, header))

    def work() -> None:
        for step in steps:
            step()

    return work


def together_seconds(stage: Stage, names: tuple[str, str], runs: int) -> dict[str, Any]:
    """Seconds a microbatch of the stage alone and beside the packing of as many, in turns."""
    packing = packing_work(names)
    stream = torch.cuda.Stream()

    def pack_all(through: SimpleQueue[torch.cuda.Event]) -> None:
        with torch.cuda.stream(stream):
            for _ in range(MICROBATCHES):
                stream.wait_event(through.get(timeout=60))
                packing()
        stream.synchronize()

    def turn(packer: ThreadPoolExecutor, *, pack: bool) -> float:
        through: SimpleQueue[torch.cuda.Event] = SimpleQueue()
        stage.begin()
        torch.cuda.synchronize()
        began = time.perf_counter()
        packed = packer.submit(pack_all, through) if pack else None
        for number in range(MICROBATCHES):
            through.put(torch.cuda.current_stream().record_event())
            stage.microbatch(number)
        torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - began
        if packed is not None:
            # Raise the packing thread's error: without packing the time means nothing.
            packed.result(timeout=60)
        return seconds / MICROBATCHES

    with ThreadPoolExecutor(1, thread_name_prefix="packing") as packer:
        turn(packer, pack=True)
        turns = [(turn(packer, pack=False), turn(packer, pack=True)) for _ in range(runs)]
    return together_row(names, turns)


def together_row(names: tuple[str, str], turns: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What is recorded of pairs of turns: seconds a microbatch of the stage alone, and beside packing."""
    alone, beside = (statistics.median(times) for times in zip(*turns, strict=True))
    return {
        "forward": names[0],
        "backward": names[1],
        "stage_seconds": alone,
        "beside_seconds": beside,
        # Compare within each pair of turns, so a changing clock affects both.
        "share": statistics.median(with_it / without - 1 for without, with_it in turns),
        "runs": len(turns),
    }


def measurements(
    stage: Sequence[float],
    packing: dict[str, dict[str, dict[str, float]]],
    together: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The measured part of the report.

    Args:
        stage: Seconds of each of the stage's microbatches, alone.
        packing: By the boundary's dtype, then by codec, what `packing_seconds` gives.
        together: Rows of `together_row`.
    """
    seconds = statistics.median(stage)
    rows: list[dict[str, Any]] = []
    for label, of_codec in packing.items():
        for backward in BACKWARD:
            both = (of_codec[FORWARD], of_codec[backward])
            device = sum(times["encode"] + times["decode"] for times in both)
            wall = sum(times["encode_wall"] + times["decode_wall"] for times in both)
            rows.append(
                {
                    "dtype": label,
                    "forward": FORWARD,
                    "backward": backward,
                    "device_seconds": device,
                    "wall_seconds": wall,
                    "share": device / seconds,
                    "wall_share": wall / seconds,
                }
            )
    return {
        "shape": list(SHAPE),
        "layers": MODEL.layers,
        "stages": STAGES,
        "stage_seconds": seconds,
        "stage_spread_seconds": [min(stage), max(stage)],
        "packing": packing,
        "rows": rows,
        "together": list(together),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what packing costs a pipeline stage on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    import triton

    codecs = (FORWARD, *BACKWARD)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    packing = {
        label: {name: packing_seconds(name, dtype, arguments.runs) for name in codecs}
        for label, dtype in dtypes.items()
    }
    stage = Stage()
    stage.begin()
    alone = event_seconds(partial(stage.microbatch, 0), arguments.runs)
    together = [together_seconds(stage, names, arguments.runs) for names in TOGETHER]
    report: dict[str, Any] = {
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "runs": arguments.runs,
        **measurements(alone, packing, together),
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"stage {report['stage_seconds'] * 1e3:.2f} ms")
    for row in report["rows"]:
        print(
            f"{row['dtype']} {row['backward']}: {row['device_seconds'] * 1e6:.0f} us, {row['share']:.3%}; "
            f"wall {row['wall_seconds'] * 1e6:.0f} us, {row['wall_share']:.3%}"
        )
    for row in together:
        print(f"beside {row['forward']}/{row['backward']}: {row['share']:+.2%} of the stage")
    return 0


if __name__ == "__main__":
    sys.exit(main())
