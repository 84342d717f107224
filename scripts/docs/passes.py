"""Tables of a stage's passes on GPUs: compute, CUDA graphs, and the outcomes of tests/gpu."""

import math

from scripts.docs.markdown import Tables, commit, if_recorded, read_report, spaced
from scripts.report import RESULTS, markdown

COMPUTE = RESULTS / "compute.json"
CAPTURED_PASSES = RESULTS / "captured_passes.json"
GPU_TESTS = RESULTS / "gpu_tests.json"
GIB = 2**30
OUTCOMES = {"passed": "passed", "skipped": "skipped", "failure": "failed", "error": "erred"}
"""Words for the outcomes, by their names in the record."""
SHARED_BY = {
    "test_gpu_group::test_gpus_do_as_one": "data parallel",
    "test_gpu_tensor_group::test_gpus_that_share_blocks_do_as_one": "tensor parallel",
}
"""The tests that compare GPUs sharing a stage with one GPU, and how their GPUs share it."""


def stage_compute() -> str:
    """A stage's time a microbatch against compiled layers and products: scripts/bench/compute.py."""
    report = read_report(COMPUTE)
    ways = ("plain", "agoq", "compiled, fastest", "compiled, fixed order", "products")
    rows = []
    for row in report["rows"]:
        seconds = row["seconds"]
        plain = seconds["plain"]
        rows.append(
            [
                row["name"],
                *(f"{1e3 * seconds[way]:.1f}" for way in ways),
                *(f"{plain / seconds[way]:.2f}" for way in ways[2:]),
            ]
        )
    columns = [("stage of", "left"), ("plain, ms", "right"), ("`agoq`", "right")]
    columns += [("compiled, fastest attention", "right"), ("compiled, fixed order", "right")]
    columns += [("products and attention alone", "right"), ("plain / fastest", "right")]
    columns += [("plain / fixed order", "right"), ("plain / products", "right")]
    (tokens,) = {row["tokens"] for row in report["rows"]}
    return f"""{markdown(columns, rows)}

Forward and backward of a microbatch of {tokens:,} tokens in bf16, three or four blocks. *Compiled* is
transformers' decoder layers under `torch.compile`: with the attention that torch prefers, whose backward does
not repeat its bits, and with torch's deterministic algorithms. *Products* are the matrix products and our
attention, nothing else. {report["hardware"]}, median of {report["rows"][0]["runs"]}, torch
{report["torch"]}, commit {commit(report)}."""


def captured_passes() -> str:
    """A middle stage's passes, through autograd and by graphs: scripts/bench/captured_passes.py."""
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


def gpu_tests() -> str:
    """GPUs that share a stage against one GPU, and all outcomes (scripts/checks/gpu_tests.py)."""
    report = read_report(GPU_TESTS)
    rows = []
    for row in report["recorded"]:
        test, _, parameters = row["test"].removesuffix("]").partition("[")
        # Other tests may record figures too; skip them.
        if test not in SHARED_BY or "largest_relative_difference" not in row:
            continue
        # `2-fp8`, or `2 x 2-fp8`: data parallel over two pairs, tensor parallel within a pair.
        sizes, _, run = parameters.partition("-")
        tensor, _, data = sizes.partition(" x ")
        difference = row["largest_relative_difference"]
        rows.append(
            [
                str(math.prod(map(int, sizes.split(" x ")))),
                f"{tensor} tensor parallel x {data} data parallel" if data else SHARED_BY[test],
                run,
                f"{difference:.1e}" if difference else "0",
            ]
        )
    columns = [("GPUs", "right"), ("shared by", "left"), ("run", "left")]
    columns += [("largest relative difference of a loss", "right")]
    found = {word: report["outcomes"].get(outcome, 0) for outcome, word in OUTCOMES.items()}
    counts = ", ".join(f"{count} {word}" for word, count in found.items() if count)
    caption = (
        "Differences are from the losses of the same run on one GPU. "
        f"Of the tests in tests/gpu, {counts}: {report['gpus']} x {spaced(report['hardware'])}, "
        f"torch {report['versions']['torch']}, commit {commit(report)}."
    )
    for outcome in ("failure", "error"):
        if named := report["others"].get(outcome):
            caption += f" {OUTCOMES[outcome].capitalize()}: {', '.join(f'`{name}`' for name in named)}."
    return f"{markdown(columns, rows)}\n\n{caption}"


TABLES: Tables = {
    "stage_compute": stage_compute,
    "captured_passes": captured_passes,
    **if_recorded(GPU_TESTS, "gpu_tests", gpu_tests),
}
