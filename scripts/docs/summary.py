"""Figures of the root README: results in six rows, and which models fit which cards and links."""

import json
from dataclasses import replace
from math import ceil
from textwrap import fill

import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.lab.results import read_results
from node.model.units import unit_parameters
from node.schedule.placement import stage_units
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_bytes
from scripts.docs import optimizers
from scripts.docs.losses import CONVERGENCE
from scripts.docs.markdown import Tables, read_report, spaced
from scripts.experiments.paper_tables import tables_beside
from scripts.report import RESULTS, markdown
from wire.codecs.registry import codec
from wire.frames import HEADER_BYTES, PAYLOAD_BYTES
from wire.spec import TensorSpec

MODELS = ((12, 768, 12), (24, 1024, 16), (24, 2048, 16))
"""Blocks, width and heads."""
FIRST_MODEL = RESULTS / "page.json"
STAGES = 4
UPLOADS_MBIT = (20, 100)
TOKENS = 1_000_000_000
DAY = 86400


def first_hour() -> str:
    """One volunteer's terminal in the recorded run, whole, with the second at which each line came."""
    recording = json.loads((RESULTS / "first_hour.json").read_text(encoding="utf-8"))
    one = next(terminal for terminal in recording["terminals"] if "--name" in terminal["typed"])
    lines = [f"{at:6.1f}  {line}" for at, line in one["lines"]]
    return "\n".join(f"    {line}".rstrip() for line in (f"$ {one['typed']}", *lines))


def first_model() -> str:
    """What came out of a recorded run from nothing, and the sentences that it adds to the first prompt."""
    report = read_report(FIRST_MODEL)
    held_out = report["held_out"]
    sent, plain = (report[key] / 1e9 for key in ("link_bytes", "link_bytes_fp32"))
    parameters = report["parameters"] / 1e6
    newest = report["samples"][-1]["step"]
    sample = next(sample for sample in report["samples"] if sample["step"] == newest)
    facts = (
        f"A run from nothing ([record](scripts/results/{FIRST_MODEL.name})): {parameters:.1f} "
        f"million parameters, two stages on one {spaced(report['hardware'])}, {report['tokens'] / 1e6:.1f} "
        f"million tokens of {report['text']} in {report['seconds'] / 60:.0f} minutes. {sent:.2f} GB crossed "
        f"the link, in FP32 {plain:.2f} GB. Its held-out loss fell from {max(held_out.values()):.2f} to "
        f"{min(held_out.values()):.2f}, and it writes:"
    )
    whole = sample["text"][: 1 + max(sample["text"].rfind(mark) for mark in ".?!")]
    lines = filter(None, f"**{sample['prompt']}**{whole}".splitlines())
    return f"{fill(facts, 118)}\n\n" + "  \n".join(f"> {line}" for line in lines)


def worth() -> str:
    """Seven rows: speed at both ends of the rates, efficiency, loss, time to a loss, memory, recovery."""
    result = read_results(RESULTS / "lab_gpt2-xl-4gpu-nic.json")
    table = tables_beside(result)[0]
    cells = {(row[0], row[2]): dict(zip(table.headings, row, strict=True)) for row in table.rows}

    def speed(rate: str) -> list[str]:
        plain, packed = cells[rate, "fp32/fp32"], cells[rate, "tah/fixed-6"]
        tokens = [one["here, tokens/s"].split(" ")[0] for one in (plain, packed)]
        return [
            f"GPT-2 XL over four GPUs, {rate} Mbit/s a machine",
            f"{tokens[0]} tokens/s in fp32",
            f"{tokens[1]} tokens/s in `tah`/`fixed-6`, {packed['here / fp32']} times",
        ]

    shares = [float(row["of the floor"]) for row in cells.values() if row["codecs"] == "tah/fixed-6"]
    runs = read_report(CONVERGENCE)["runs"]
    losses = {run["forward"]: run["loss_valid"] for run in runs if run["suite"] == "long" and not run["seed"]}
    loss = {name: f"{100 * (losses[name] / losses['fp16'] - 1):+.2f} %" for name in ("trellis-4.41", "tah")}
    peaks: dict[str, list[int]] = {"bf16": [], "agoq": []}
    for row in read_report(RESULTS / "stored_activations.json")["rows"]:
        peaks.setdefault(row["way"], []).append(row["peak_bytes"])
    pairs = zip(peaks["bf16"], peaks["agoq"], strict=True)
    saved = [100 * (1 - packed / plain) for plain, packed in pairs]
    slow, run, fast = optimizers.fastest(100)
    soak = read_report(RESULTS / "soak.json")
    back = soak["seconds_to_recover_from_a_node"]
    rows = [
        speed("100"),
        speed("1000"),
        [
            "efficiency at these and two rates between",
            "1.00: the line is never idle",
            f"{min(shares):.2f} to {max(shares):.2f}",
        ],
        [
            "held-out loss, 124 million parameters, 59 million tokens",
            f"{losses['fp16']:.4f} in fp16",
            f"{loss['trellis-4.41']} with `trellis-4.41`, {loss['tah']} with `tah`",
        ],
        [
            "the same model to the loss of AdamW with `tah`, 100 Mbit/s a machine, by arithmetic",
            f"{slow:,.0f} s with `tah`/`fixed-8`",
            f"{fast:,.0f} s with {run['optimizer'].title()} and `{run['forward']}`/`{run['backward']}`, "
            f"{slow / fast:.2f} times as fast",
        ],
        [
            'peak memory of a block\'s passes, `storage.preset = "agoq"`',
            "in bf16",
            f"{min(saved):.0f} to {max(saved):.0f} % less",
        ],
        [
            f"{soak['kills']} processes killed at random in {soak['runs']} runs",
            "weights of the run left alone",
            f"same bits; back in {back['median']:.1f} s, at most {back['max']:.1f} s",
        ],
    ]
    return markdown([("what", "left"), ("without", "left"), ("with thinwire", "left")], rows)


def planning() -> str:
    """The program's estimates for four friends' cards and links, one row per model."""
    columns = [
        *(("parameters", "right"), ("fullest card", "right"), ("with low-bit storage", "right")),
        ("upload a step", "right"),
        *((f"at {mbit} Mbit/s", "left") for mbit in UPLOADS_MBIT),
    ]
    return markdown(columns, [_plan(*shape) for shape in MODELS])


def _plan(layers: int, hidden: int, heads: int) -> list[str]:
    model = ModelSection(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=ceil(hidden * 8 / 3 / 256) * 256,
        vocab=50257,
        sequence=1024,
    )
    training = TrainingSection(global_batch=32, precision="bfloat16")
    config = RunConfig(model=model, training=training, pipeline=PipelineSection(stages=STAGES))
    card = Devices(on_cpu=False)
    small = replace(
        config,
        training=replace(training, gradients="fp8", moments="fp8"),
        storage=StorageSection(preset="agoq"),
    )
    most, least = (max(stage_bytes(one, STAGES, card)) / 1e9 for one in (config, small))
    parameters = sum(unit_parameters(model, unit) for stage in stage_units(config, STAGES) for unit in stage)
    # A middle stage uploads activations to the next stage and gradients to the previous one.
    pipeline = config.pipeline
    packed = _framed(pipeline.forward_codec, config) + _framed(pipeline.backward_codec, config)
    upload = config.microbatches * packed
    steps = TOKENS / (training.global_batch * model.sequence)
    times = [upload * 8 / (mbit * 1e6) for mbit in UPLOADS_MBIT]
    return [
        f"{parameters / 1e6:.0f} million",
        f"{most:.1f} GB",
        f"{least:.1f} GB",
        f"{upload / 1e6:.0f} MB",
        *(f"{seconds:.1f} s a step, {steps * seconds / DAY:.1f} days a billion tokens" for seconds in times),
    ]


def _framed(name: str, config: RunConfig) -> int:
    """Bytes of a microbatch's boundary tensor on the wire."""
    shape = (config.training.microbatch, config.model.sequence, config.model.hidden)
    size = codec(name).packed_bytes(TensorSpec(torch.float32, shape))
    return size + HEADER_BYTES * ceil(size / PAYLOAD_BYTES)


TABLES: Tables = {"first_hour": first_hour, "first_model": first_model, "worth": worth, "planning": planning}
