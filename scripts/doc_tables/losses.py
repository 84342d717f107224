"""Tables of losses: what codecs between stages cost in training."""

from typing import Any

from .markdown import LOSSES, RESULTS, Tables, against, commit, markdown, read_report, spaced

CODEC_LOSSES = tuple(RESULTS / f"codec_loss{which}.json" for which in ("", "_earlier", "_16_cores"))
"""The newest report, and what earlier ones have besides: more widths and seeds, another machine."""
CONVERGENCE = RESULTS / "convergence.json"
BASELINE = ("fp32", "fp32")


def codec_loss() -> str:
    """Loss of each codec pair, a table for each machine that measured."""
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


def convergence() -> str:
    """What scripts/exp_convergence.py recorded: a model of 124 million parameters, by codec."""
    report = read_report(CONVERGENCE)
    rows = []
    for run in report["runs"]:
        losses = run.get("losses")
        at_300 = losses[299] if losses else run["losses_at"]["300"]
        valid = run["loss_valid"]
        million = run["steps"] * report["tokens_a_step"] / 1e6
        codecs = f"`{run['forward']}`", f"`{run['backward']}`"
        # An fp16 without an exponent, since mended.
        mark = " *" if run["forward"] == "fp16" else ""
        rows.append(
            (f"{million:.1f}", *codecs, f"{at_300:.4f}", f"{valid:.4f}{mark}" if valid else "not measured")
        )
    columns = (
        ("million tokens", "right"),
        ("activations", "left"),
        ("gradients", "left"),
        ("training loss, step 300", "right"),
        ("held-out loss", "right"),
    )
    return f"""{markdown(columns, rows)}

A Llama of 124 million parameters, 4 stages, GPT-2's tokens of books, {report["tokens_a_step"]:,} tokens a
step, one seed, {report["hardware"]}, torch {report["versions"]["torch"]}, commit {commit(report)}.
(*) With an fp16 that had no exponent yet: gradients vanished."""


TABLES: Tables = {
    "codec_loss": codec_loss,
    "convergence": convergence,
}
