"""Tables of fine-tuning: losses beside transformers and peft, what LoRA takes and sends, a large corpus."""

from textwrap import fill
from typing import Any

from scripts.docs.markdown import Tables, commit, if_recorded, read_report
from scripts.report import RESULTS, markdown

FINE_TUNING = RESULTS / "fine_tuning.json"
LORA = RESULTS / "lora.json"
LARGE_CORPUS = RESULTS / "large_corpus.json"
GB = 1e9


def fine_tuning() -> str:
    """Losses of the same steps, here and there."""
    report = read_report(FINE_TUNING)
    rows = [
        (
            name,
            f"{way['losses'][0]:.4f}",
            f"{way['losses'][-1]:.4f}",
            f"{way['their_losses'][-1]:.4f}",
            f"{way['held_out'][0]:.4f}",
            f"{way['held_out'][1]:.4f}",
            f"{way['their_held_out'][1]:.4f}",
            f"{100 * way['largest_difference']:.1g} %",
            "the same" if way["stages_equal_one"] else "others",
        )
        for name, way in report["ways"].items()
    ]
    columns = [("trained", "left"), ("first loss", "right"), ("last loss", "right"), ("theirs", "right")]
    columns += [("held out before", "right"), ("held out after", "right"), ("theirs after", "right")]
    columns += [("largest difference", "right"), ("bits of four stages", "left")]
    first, versions = report["checkpoint"], report["versions"]
    caption = (
        f"A GPT-2 of {first['parameters']:,} parameters, trained here for {first['tokens']:,} tokens of "
        f"Python's standard library, saved by transformers, then {report['steps']} steps of "
        f"{report['samples']} x {report['sequence']} tokens of this repository in {report['precision']}, "
        f"{report['runs']} run, {report['hardware']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, peft {versions['peft']}, commit {commit(report)}. The largest "
        "difference is that of all steps' losses and of the held-out losses, relative. Four stages: the "
        f"first {report['ways']['full']['stage_steps']} steps, every boundary through the `fp32` codec."
    )
    return f"{markdown(columns, rows)}\n\n{fill(caption, 118)}"


def lora() -> str:
    """A stage of an 8B shape: memory, speed, and bytes of snapshots and of gradients."""
    report = read_report(LORA)
    settings = report["settings"]
    full = next(one for name, one in settings.items() if name.startswith("full"))

    def share(one: dict[str, Any], key: str) -> str:
        return f"{one[key] / GB:.2f} ({100 * one[key] / full[key]:.3g} %)"

    rows = [
        (
            name,
            f"{one['tokens_per_second']:,.0f}",
            f"{one['state_bytes'] / GB:.2f}",
            f"{one['peak_bytes'] / GB:.2f}",
            share(one, "snapshot_bytes"),
            share(one, "gradient_bytes"),
        )
        for name, one in settings.items()
    ]
    columns = [("setting", "left"), ("tokens/s", "right"), ("state GB", "right"), ("peak GB", "right")]
    columns += [("snapshot GB", "right"), ("gradients GB", "right")]
    caption = (
        f"A stage of {report['blocks']} blocks of Llama 3's 8B shape, steps of four microbatches of "
        f"{report['samples']} x {report['length']} tokens, two in flight, {report['steps']} timed steps, "
        f"{report['hardware']}, torch {report['versions']['torch']}, commit {commit(report)}. State: "
        "weights, gradients and moments before the first step. Snapshot and gradients are the whole model's, "
        "the gradients in float32, before a codec; beside them the share of the first row's."
    )
    return f"{markdown(columns, rows)}\n\n{fill(caption, 118)}"


def large_corpus() -> str:
    """When the first step of a corpus larger than memory is done, in words."""
    report = read_report(LARGE_CORPUS)
    same = "with the same bits" if report["resume_has_the_same_bits"] else "with other bits"
    text = (
        f"Measured with {report['corpus_bytes'] / GB:.3g} GB of JSONL on a machine with "
        f"{report['memory_bytes'] / GB:.3g} GB of memory, whose tokenizing would take "
        f"{report['hours_to_tokenize']:.2g} hours at the rate of its beginning: the first step was done "
        f"{report['seconds_to_first_step']:.0f} s after the coordinator was started, two nodes' joining "
        f"included, and the coordinator had {report['coordinator_peak_bytes'] / GB:.2g} GB at most. Stopped "
        f"after {report['stopped_after']} of {report['steps']} steps and resumed, the run ends {same} "
        f"({report['hardware']}, {report['runs']} run, commit {commit(report)})."
    )
    return fill(text, 118)


TABLES: Tables = {
    "fine_tuning": fine_tuning,
    "lora": lora,
    **if_recorded(LARGE_CORPUS, "large_corpus", large_corpus),
}
