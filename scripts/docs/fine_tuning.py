"""Tables of fine-tuning: losses beside transformers and peft, what LoRA takes and sends, a large corpus."""

from textwrap import fill

from scripts.docs.markdown import Tables, commit, read_report
from scripts.report import RESULTS, markdown

FINE_TUNING = RESULTS / "fine_tuning.json"
LORA = RESULTS / "lora.json"
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


TABLES: Tables = {
    "fine_tuning": fine_tuning,
}
