"""The table of what CUDA graphs save a stage."""

from .markdown import RESULTS, Tables, commit, markdown, read_report

CAPTURED_PASSES = RESULTS / "captured_passes.json"
GIB = 2**30


def captured_passes() -> str:
    """A middle stage's passes, through autograd and by graphs: scripts/bench_captured_passes.py."""
    report = read_report(CAPTURED_PASSES)
    rows = []
    for row in report["rows"]:
        plain, graphs = row["autograd"], row["graphs"]
        rows.append(
            [
                row["name"],
                f"{row['tokens']:,}",
                f"`{row['storage']}`",
                f"{1e3 * plain['seconds']:.1f}",
                f"{1e3 * graphs['seconds']:.1f}",
                f"{plain['seconds'] / graphs['seconds']:.1f}",
                f"{1e3 * plain['host_seconds']:.1f}",
                f"{1e3 * graphs['host_seconds']:.1f}",
                f"{plain['memory_bytes'] / GIB:.1f}",
                f"{graphs['memory_bytes'] / GIB:.1f}",
            ]
        )
    columns = [("stage of", "left"), ("tokens a microbatch", "right"), ("storage", "left")]
    columns += [("autograd, ms", "right"), ("graphs, ms", "right"), ("times as fast", "right")]
    columns += [("host, autograd", "right"), ("graphs", "right")]
    columns += [("GiB, autograd", "right"), ("graphs", "right")]
    different = sum(row["different_tensors"] for row in report["rows"])
    runs = min(row["runs"] for row in report["rows"])
    return f"""{markdown(columns, rows)}

Forward and backward of a microbatch in a middle stage of four, two microbatches in flight; *host* is how long
the calling thread takes to ask for it, memory the most that torch takes. Tensors that differ between the two
ways, of all that a third step gives and leaves: {different}. {report["hardware"]}, median of {runs}, torch
{report["torch"]}, commit {commit(report)}."""


TABLES: Tables = {"captured_passes": captured_passes}
