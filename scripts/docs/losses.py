"""Tables of losses in training, by codec and by storage."""

import math
from typing import Any

from scripts.docs.markdown import Tables, commits, read_report
from scripts.report import RESULTS, markdown

CONVERGENCE = RESULTS / "convergence.json"


SUITES = {
    "long": "{tokens:.0f} million tokens",
    "pass": "{tokens:.1f} million",
    "epochs": "{tokens:.1f} million, each text four times",
    "backward": "{tokens:.1f} million, few bits backward",
}
"""Names of the suites of scripts/experiments/convergence.py, in the tables' order."""
UNCHANGED = ("fp16", "fp16")
UNCOMPRESSED = ("fp16", "fp32", "bf16")
KEPT = {
    "plain": "everything in bf16 and fp32",
    "activations": "activations: `agoq`",
    "compact": "activations: `compact`",
    "attention-6": "`compact`, attention in 6 bits",
    "ffn-3": "`compact`, FFN's inputs in 3 bits",
    "all-4": "activations: all in 4 bits",
    "gradients": "gradients in FP8",
    "moments": "moments in FP8",
    "three": "`agoq`, gradients and moments in FP8",
    "three-by-stage": "the same, bits by stage",
    "three-bf16-weights": "the same, weights in bf16",
}


def convergence() -> str:
    """Results of scripts/experiments/convergence.py: a model of 124 million parameters, by codec."""
    report = read_report(CONVERGENCE)
    rows = []
    for suite, words in SUITES.items():
        runs = [run for run in report["runs"] if run["suite"] == suite]
        like = "pass" if suite == "backward" else suite
        baseline = next(
            run
            for run in report["runs"]
            if (run["suite"], run["forward"], run["backward"], run["seed"]) == (like, *UNCHANGED, 0)
        )
        for run in sorted(runs, key=lambda run: (run["forward"], run["backward"]) != UNCHANGED):
            change = 100 * (run["loss_valid"] / baseline["loss_valid"] - 1)
            error = [value for key, value in run["relative_error"].items() if key.startswith("activation")]
            rows.append(
                (
                    words.format(tokens=run["steps"] * report["tokens_a_step"] / 1e6),
                    f"`{run['forward']}`",
                    f"`{run['backward']}`",
                    str(run["seed"]),
                    f"{sum(error) / len(error):.4f}",
                    f"{run['loss_last']:.4f}",
                    f"{run['loss_valid']:.4f}",
                    "" if run is baseline else f"{change:+.2f} %",
                    f"{math.exp(run['loss_valid']):.1f}",
                )
            )
    columns = [("trained on", "left"), ("activations", "left"), ("gradients", "left"), ("seed", "right")]
    columns += [("error of activations", "right"), ("training loss", "right"), ("held-out loss", "right")]
    columns += [("against fp16, seed 0", "right"), ("perplexity", "right")]
    shown = [run for run in report["runs"] if run["suite"] in SUITES]
    return f"""{markdown(columns, rows)}

A Llama of 124 million parameters, 4 stages, GPT-2's tokens of books, {report["tokens_a_step"]:,} tokens a
step, {report["hardware"]}, torch {report["versions"]["torch"]}, commit {commits(report, shown)}.
Training loss: the mean of the last 20 steps, through the codecs. Held out: the final weights without codecs,
on {report["validation_windows"]} windows of other books. `naive-4`: 4 bits, one scale for a whole tensor.
`aqsgd-4`: by a stand-in that the script has for the codec of that name; it remembers samples in
{_remembered(report["runs"])}."""


def _remembered(runs: list[dict[str, Any]]) -> str:
    """Dtype of the sample cache in the script's AQ-SGD; newer reports record it."""
    kinds = {run.get("remembered") or "torch.float16" for run in runs if run["forward"].startswith("aqsgd-")}
    if kinds == {"torch.bfloat16"}:
        return "bf16, as the codec does"
    return f"{' and '.join(kind.removeprefix('torch.') for kind in sorted(kinds))}, the codec in bf16"


def convergence_words() -> str:
    """Sentences on the same runs: the longest ones, few bits backward, distance between equal runs."""
    report = read_report(CONVERGENCE)
    runs = report["runs"]
    long = {(run["forward"], run["seed"]): run["loss_valid"] for run in runs if run["suite"] == "long"}
    codecs = ", ".join(
        f"`{name}` {100 * (loss / long['fp16', 0] - 1):+.2f} %"
        for (name, seed), loss in long.items()
        if name != "fp16" and not seed
    )
    seeds = [loss for (name, _), loss in long.items() if name == "fp16"]
    back = {run["backward"]: run["loss_valid"] for run in runs if run["suite"] == "backward"}
    naive = back.pop("naive-4")
    others = ", ".join(f"`{name}` {loss:.2f}" for name, loss in back.items())
    # Uncompressed runs differ only in rounding and in their seed.
    alike = [
        run["loss_valid"]
        for run in runs
        if run["suite"] == "pass" and run["forward"] == run["backward"] and run["forward"] in UNCOMPRESSED
    ]
    unchanged = alike[0]
    steps = {run["suite"]: run["steps"] * report["tokens_a_step"] / 1e6 for run in runs}
    return f"""At 124 million parameters, after {steps["long"]:.0f} million tokens, held-out loss is off
fp16's by {codecs}; two seeds of fp16 lie {spread(seeds)} apart.
With few bits for gradients it ends, after {steps["backward"]:.0f} million tokens, at {naive:.2f} by
`naive-4`, where fp16 has {unchanged:.2f}; by {others}.
Runs that ought to be equal ({", ".join(UNCOMPRESSED)}, another seed) lie up to {spread(alike)} apart after
{steps["pass"]:.0f} million tokens, so that smaller differences there mean nothing."""


def mixture_words() -> str:
    """The suite `mixture` of scripts/experiments/convergence.py."""
    report = read_report(RESULTS / "mixture_loss.json")
    plain, coded = report["runs"]
    model = report["mixture_model"]
    change = 100 * (coded["loss_valid"] / plain["loss_valid"] - 1)
    return (
        f"A mixture of {model['experts']} experts, of which a token has {model['experts_per_token']}, with "
        f"{model['layers']} layers of width {model['hidden']} and experts of {model['ffn']}, trained on "
        f"{plain['steps'] * report['tokens_a_step'] / 1e6:.0f} million tokens: held-out loss "
        f"{plain['loss_valid']:.4f} without codecs, {coded['loss_valid']:.4f} ({change:+.2f} %) with "
        f"`{coded['forward']}`/`{coded['backward']}` at three boundaries, one seed each. "
        f"{report['hardware']}, torch {report['versions']['torch']}, "
        f"commit {commits(report, report['runs'])}."
    )


def spread(losses: list[float]) -> str:
    """How far the largest lies above the smallest."""
    return f"{100 * (max(losses) / min(losses) - 1):.2f} %"


def convergence_memory() -> str:
    """The suites `memory` and `memory-long` of the same script: tensors that a node packs, by seed."""
    report = read_report(CONVERGENCE)
    return "\n\n".join(_memory(report, suite) for suite in ("memory", "memory-long"))


def _memory(report: dict[str, Any], suite: str) -> str:
    runs = [run for run in report["runs"] if run["suite"] == suite]
    seeds = sorted({run["seed"] for run in runs})
    ways: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        ways.setdefault((run["memory"], run["forward"]), {})[run["seed"]] = run
    plain = ways["plain", "fp32"]
    rows = []
    for (memory, forward), by_seed in ways.items():
        # Compare each with the plain run of its own seed.
        changes = [run["loss_valid"] / plain[seed]["loss_valid"] - 1 for seed, run in by_seed.items()]
        rows.append(
            [
                KEPT[memory] + _stage_bits(next(iter(by_seed.values()))),
                f"`{forward}`",
                *(f"{by_seed[seed]['loss_valid']:.4f}" if seed in by_seed else "" for seed in seeds),
                "" if by_seed is plain else f"{100 * sum(changes) / len(changes):+.2f} %",
                f"{max(run['peak_memory_bytes'] for run in by_seed.values()) / 2**30:.1f}",
            ]
        )
    columns = [("kept", "left"), ("boundaries", "left")]
    columns += [(f"held-out loss, seed {seed}", "right") for seed in seeds]
    columns += [("against the first line, same seeds", "right"), ("peak memory, GiB", "right")]
    losses = [run["loss_valid"] for run in plain.values()]
    tokens = runs[0]["steps"] * report["tokens_a_step"] / 1e6
    return f"""{markdown(columns, rows)}

The model of 124 million parameters, {tokens:.1f} million tokens, eight microbatches a step, all of it on one
{report["hardware"]}, torch {report["versions"]["torch"]}, commit {commits(report, runs)}. The first line's
{len(losses)} seeds lie {spread(losses)} apart."""


def _stage_bits(run: dict[str, Any]) -> str:
    """Bits of norm and FFN inputs at each stage, if they differ."""
    bits = run.get("stage_bits", [])
    return f" ({', '.join(bits)})" if len(set(bits)) > 1 else ""


TABLES: Tables = {
    "convergence": convergence,
    "convergence_words": convergence_words,
    "convergence_memory": convergence_memory,
    "mixture_words": mixture_words,
}
