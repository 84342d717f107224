"""Tables of losses in training, by codec and by storage."""

import math
from functools import partial
from pathlib import Path
from typing import Any

from scripts.docs.markdown import LOSSES, Tables, against, commit, commits, read_report, spaced
from scripts.report import RESULTS, markdown

CODEC_LOSSES = tuple(RESULTS / f"codec_loss{which}.json" for which in ("", "_earlier", "_16_cores"))
"""The newest report, and earlier ones with more widths and seeds or another machine."""
CONVERGENCE = RESULTS / "convergence.json"
GRADIENT_BIAS = RESULTS / "gradient_bias.json"
GRADIENT_RATES = RESULTS / "gradient_rates.json"
SYNC_LOSS = RESULTS / "sync_loss.json"
SYNC_LOSS_LARGE = RESULTS / "sync_loss_124m.json"
LOCAL_STEPS = RESULTS / "local_steps_124m.json"
LOCAL_STEPS_WAYS = RESULTS / "local_steps_ways.json"
BASELINE = ("fp32", "fp32")


def codec_loss() -> str:
    """Loss of each codec pair, one table per machine."""
    return "\n\n".join(_losses(read_report(path)) for path in CODEC_LOSSES)


def _losses(report: dict[str, Any]) -> str:
    """One report's losses, and their distance from the uncompressed run of the same width and seed."""
    runs = report["runs"]
    by_key = {(*_model(run), run["seed"]): run for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    columns = [("width", "right"), ("activations", "left"), ("gradients", "left")]
    columns += [("bits out", "right"), ("bits back", "right")]
    for seed in seeds:
        columns += [(f"loss, seed {seed}", "right"), (f"held out, seed {seed}", "right")]
    rows = []
    for model in sorted({_model(run) for run in runs}, key=_order):
        width, forward, backward = model
        any_run = next(run for run in runs if _model(run) == model)
        row = [str(width), f"`{forward}`", f"`{backward}`"]
        row += [f"{any_run['bits_forward']:.2f}", f"{any_run['bits_backward']:.2f}"]
        for seed in seeds:
            baseline = by_key.get((width, *BASELINE, seed))
            row += [against(by_key.get((*model, seed)), baseline, key) for key in LOSSES]
        rows.append(row)
    settings = report["settings"]
    caption = (
        f"{settings['run.steps']} steps of {settings['training.global_batch']} x "
        f"{settings['model.sequence']} tokens, {settings['model.layers']} layers, "
        f"{settings['pipeline.stages']} stages, {report['data']['name']}; "
        f"{len(runs)} runs, {spaced(report['hardware'])}, torch {report['versions']['torch']}, Python "
        f"{report['versions']['python']}, commit {commit(report)}. "
        f"Loss is the mean of the last {report['last_steps']} steps; held out is the loss of the final "
        f"weights, without codecs, on {report['held_out_windows']} windows that no step saw."
    )
    return markdown(columns, rows) + "\n\n" + caption


def _model(run: dict[str, Any]) -> tuple[int, str, str]:
    return run["width"], run["forward_codec"], run["backward_codec"]


def _order(model: tuple[int, str, str]) -> tuple[Any, ...]:
    """By width, then the uncompressed run, then by name."""
    return model[0], model[1:] != BASELINE, model


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


def gradient_bias() -> str:
    """What gradients in few bits cost, with and without a mean error."""
    rows, captions = [], []
    for report in read_report(GRADIENT_BIAS)["reports"]:
        plain = next(run for run in report["runs"] if run["way"] == "none")
        settings = report["settings"]
        tokens = settings["steps"] * settings["batch"] * settings["sequence"] / 1e6
        for run in report["runs"]:
            bits, error = run.get("gradient_bits", []), run.get("gradient_error", [])
            rows.append(
                [
                    f"{tokens:.1f} million",
                    f"`{run['way'].replace('codec:', '')}`",
                    f"{sum(bits) / len(bits):.2f}" if bits else "",
                    f"{sum(error) / len(error):.3f}" if error else "",
                    f"{run['held_out_loss']:.3f}",
                    "" if run is plain else f"{run['held_out_loss'] / plain['held_out_loss'] - 1:+.1%}",
                ]
            )
        captions.append(f"{report['hardware']}, torch {report['torch']}, commit {commit(report)}")
    columns = [("trained on", "left"), ("gradients", "left"), ("bits", "right"), ("error", "right")]
    columns += [("held-out loss", "right"), ("against none", "right")]
    return (
        f"{markdown(columns, rows)}\n\nEight blocks 1024 wide, seven boundaries, in one process, activations "
        "unpacked, one seed; lines of one number of tokens compare. Error: relative, of the last steps' "
        f"gradients. {'; '.join(dict.fromkeys(captions))}."
    )


def rate_changes(report: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """By codecs of activations and gradients: how far each seed's held-out loss is from that without, as a
    share."""
    losses = {(run["way"], run["seed"]): run["held_out_loss"] for run in report["runs"]}
    found: dict[tuple[str, str], list[float]] = {}
    for (way, seed), loss in losses.items():
        if way != "none":
            there, _, back = way.replace("codec:", "").partition("/")
            found.setdefault((there, back or there), []).append(loss / losses["none", seed] - 1)
    return found


def gradient_rates() -> str:
    """What codecs both ways cost at several rates."""
    report = read_report(GRADIENT_RATES)
    runs, settings = report["runs"], report["settings"]
    seeds = sorted({run["seed"] for run in runs})
    plain = [run["held_out_loss"] for run in runs if run["way"] == "none"]
    rows = [["none", "none", "", "", *(f"{loss:.4f}" for loss in plain), "", ""]]
    for (there, back), changes in rate_changes(report).items():
        way = [run for run in runs if run["way"] == f"codec:{there}/codec:{back}"]
        bits = [
            sum(way[0][f"{kind}_bits"]) / len(way[0][f"{kind}_bits"]) for kind in ("activation", "gradient")
        ]
        rows.append(
            [
                f"`{there}`",
                f"`{back}`",
                *(f"{each:.2f}" for each in bits),
                *(f"{run['held_out_loss']:.4f}" for run in way),
                f"{sum(changes) / len(changes):+.2%}",
                f"{min(changes):+.2%} to {max(changes):+.2%}",
            ]
        )
    columns = [("activations", "left"), ("gradients", "left"), ("bits out", "right"), ("bits back", "right")]
    columns += [(f"held-out loss, seed {seed}", "right") for seed in seeds]
    columns += [("mean change", "right"), ("by seed", "right")]
    tokens = settings["steps"] * settings["batch"] * settings["sequence"] / 1e6
    return (
        f"{markdown(columns, rows)}\n\n{settings['layers']} blocks {settings['width']} wide, "
        f"{settings['layers'] - 1} boundaries, {tokens:.1f} million tokens of books in GPT-2's tokens, "
        f"{settings['steps']} steps of {settings['batch']} x {settings['sequence']}. Seeds without codecs "
        f"lie {spread(plain)} apart. {report['hardware']}, torch {report['torch']}, commit {commit(report)}."
    )


def sync_loss(path: Path = SYNC_LOSS) -> str:
    """What packed sums of gradient groups and rounds of local steps cost."""
    report = read_report(path)
    exact = {run["seed"]: run for run in report["runs"] if (run["every"], run["codec"]) == (1, "fp32")}
    ways: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for run in report["runs"]:
        ways.setdefault((run["every"], run["codec"]), {})[run["seed"]] = run
    rows = []
    for (every, codec), by_seed in sorted(ways.items(), key=lambda way: way[0][0]):
        changes = [run["loss_held_out"] / exact[seed]["loss_held_out"] - 1 for seed, run in by_seed.items()]
        plain = by_seed is ways[1, "fp32"]
        rows.append(
            [
                "exact, every step" if every == 1 else f"every {every} local steps",
                f"`{codec}`",
                *(against(by_seed.get(seed), exact[seed], "loss_held_out") for seed in exact),
                "" if plain else f"{100 * sum(changes) / len(changes):+.2f} %",
            ]
        )
    columns = [("sum of gradient groups", "left"), ("codec", "left")]
    columns += [(f"held-out loss, seed {seed}", "right") for seed in exact]
    columns += [("mean change", "right")]
    tokens = report["training"]["global_batch"] * report["model"]["sequence"]
    model = report["model"]
    losses = [run["loss_held_out"] for run in exact.values()]
    summed = [run for run in report["runs"] if run["every"] == 1]
    apart = max(
        (spread([run["loss_held_out"] for run in summed if run["seed"] == seed]) for seed in exact),
        key=lambda words: float(words.split()[0]),
    )
    local = seeds = ""
    if len(losses) > 1:
        seeds = f"Seeds of `fp32` lie {spread(losses)} apart, exact runs of one seed up to {apart}. "
    if len(summed) < len(report["runs"]):
        local = (
            f"Local steps begin after {report['warm']} exact ones, with outer learning rate "
            f"{report['outer_lr']:g} and momentum {report['outer_momentum']:g}. "
        )
    return (
        f"{markdown(columns, rows)}\n\n{report['parameters'] / 1e6:.2f} million parameters "
        f"({model['layers']} layers, {model['hidden']} wide), {report['data']['name']} in "
        f"{report['tokenizer']}, {report['groups']} groups, {report['steps']} optimizer steps of {tokens:,} "
        f"tokens, {report['steps'] * tokens / 1e6:.2f} million in all. {local}"
        f"Held out: {report['held_out_windows']} windows. {seeds}"
        f"{spaced(report['hardware'])}, torch {report['versions']['torch']}, commit "
        f"{commits(report, report['runs'])}."
    )


def local_steps_ways() -> str:
    """What a round's first moment begins at, and how far the outer optimizer goes."""
    report = read_report(LOCAL_STEPS_WAYS)
    columns = [("first moment begins at", "left"), ("local steps", "right"), ("outer learning rate", "right")]
    columns += [("momentum", "right"), ("steps", "right"), ("highest loss", "right"), ("held out", "right")]
    rows = [
        [
            run["first_moment"],
            str(run["every"]),
            f"{run['outer_lr']:g}",
            f"{run['outer_momentum']:g}",
            str(run["steps"]),
            f"{max(run['losses']):.2f}",
            f"{run['loss_held_out']:.4f}",
        ]
        for run in report["runs"]
    ]
    exact = report["exact"]
    return (
        f"{markdown(columns, rows)}\n\nExact steps: {exact['loss_held_out']:.4f} after {exact['steps']}. "
        f"{report['how']} {report['hardware']}, torch {report['versions']['torch']}, commit {commit(report)}."
    )


TABLES: Tables = {
    "sync_loss": sync_loss,
    "sync_loss_large": partial(sync_loss, SYNC_LOSS_LARGE),
    "local_steps": partial(sync_loss, LOCAL_STEPS),
    "local_steps_ways": local_steps_ways,
    "gradient_bias": gradient_bias,
    "gradient_rates": gradient_rates,
    "codec_loss": codec_loss,
    "convergence": convergence,
    "convergence_words": convergence_words,
    "convergence_memory": convergence_memory,
}
