"""Tables of a stage's passes on GPUs: compute, CUDA graphs, and the outcomes of tests/gpu."""

import math
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from scripts.docs.markdown import Tables, commit, if_recorded, read_report, spaced
from scripts.report import RESULTS, markdown

COMPUTE = RESULTS / "compute.json"
COMPILED = RESULTS / "compute_compiled.json"
COMPUTE_FP8 = RESULTS / "compute_h100.json"
FP8_LOSS = RESULTS / "fp8_loss.json"
FP8_WAYS = {
    "plain": "bf16",
    "fp8": "FP8, gradients of weights in bf16",
    "fp8-three": "the same, with `agoq`, gradients and moments in FP8",
}
WHOLE_MODEL = RESULTS / "whole_model.json"
WHOLE_MODEL_H100 = RESULTS / "whole_model_h100.json"
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
    report, earlier = read_report(COMPUTE), read_report(COMPILED)
    elsewhere = {(row["name"], row["blocks"]): row["seconds"] for row in earlier["rows"]}
    ours = ("plain", "plain, any order", "agoq", "fp8", "fp8, agoq")
    others = ("compiled, fastest", "products")
    rows, borrowed = [], False
    for row in report["rows"]:
        seconds = {**elsewhere.get((row["name"], row["blocks"]), {}), **row["seconds"]}
        borrowed = borrowed or ("compiled, fastest" in seconds and "compiled, fastest" not in row["seconds"])
        compiled = seconds.get("compiled, fastest", math.nan)
        shares = (
            seconds["plain"] / compiled,
            seconds["plain, any order"] / compiled,
            seconds["fp8"] / compiled,
            seconds["plain"] / seconds["products"],
        )
        rows.append(
            [
                row["name"],
                *(_number(1e3 * seconds.get(way, math.nan), 1) for way in (*ours, *others)),
                *(_number(share, 2) for share in shares),
            ]
        )
    columns = [("stage of", "left"), ("plain, ms", "right"), ("in any order", "right"), ("`agoq`", "right")]
    columns += [("FP8", "right"), ("FP8, `agoq`", "right"), ("compiled", "right"), ("products", "right")]
    columns += [("plain / compiled", "right"), ("any order / compiled", "right")]
    columns += [("FP8 / compiled", "right"), ("plain / products", "right")]
    (tokens,) = {row["tokens"] for row in report["rows"]}
    caption = f"""Forward and backward of a microbatch of {tokens:,} tokens, four blocks. *Compiled* is
transformers' decoder layers under `torch.compile` in bf16, with the attention that torch prefers, whose
backward does not repeat its bits. *In any order* is our stage with `training.deterministic = false`, *FP8*
with `training.compute = "fp8"`. `agoq` also has gradients and moments in FP8 and weights in bf16. *Products*
are the matrix products in bf16 and our attention, nothing else. {report["hardware"]}, median of
{report["rows"][0]["runs"]}, torch {report["torch"]}, commit {commit(report)}."""
    if borrowed:
        caption += f" Compiled layers: another run on the same kind of card, commit {commit(earlier)}."
    return f"{markdown(columns, rows)}\n\n{caption}"


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def whole_model() -> str:
    """Steps of a whole model on one GPU beside a compiled transformers loop: scripts/bench/whole_model.py."""
    return _whole_model(read_report(WHOLE_MODEL))


def whole_model_newer() -> str:
    """The same on another card."""
    return _whole_model(read_report(WHOLE_MODEL_H100))


def _whole_model(report: Mapping[str, Any]) -> str:
    rows = []
    for row in report["rows"]:
        for name, seconds in row["seconds"].items():
            start = row["start_seconds"].get(name)
            rows.append(
                [
                    row["name"],
                    name,
                    f"{row['tokens_per_second'][name]:,.0f}",
                    f"{seconds:.3f}",
                    f"{100 * row['beside_share'][name]:.1f}" if name in row["beside_share"] else "",
                    f"{start['first step']:.1f}" if start else "",
                    f"{start['second step']:.1f}" if start else "",
                ]
            )
    columns = [("model", "left"), ("way", "left"), ("tokens/s", "right"), ("a step, s", "right")]
    columns += [("neither forward nor backward, %", "right"), ("first step, s", "right")]
    columns += [("second step, s", "right")]
    sizes = " and ".join(f"{row['tokens']:,}" for row in report["rows"])
    return f"""{markdown(columns, rows)}

Steps of {sizes} tokens, AdamW on float32 weights, clipping; *compiled* is transformers' model in bf16
autocast, each layer under `torch.compile`, with torch's fused AdamW. The first step compiles kernels, the
second captures graphs. {report["hardware"]}, median of {report["rows"][0]["runs"]}, torch
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


def fp8_compute() -> str:
    """A stage's products in FP8 beside torchao's: scripts/bench/compute.py on another card."""
    report = read_report(COMPUTE_FP8)
    ways = ("plain", "plain, any order", "agoq", "fp8", "fp8, any order", "fp8, agoq", "fp8, all products")
    ways += ("fp8, all products, any order", "compiled, torchao", "compiled, fixed order")
    rows = []
    for row in report["rows"]:
        compiled = row["seconds"]["compiled, fastest"]
        rows.append([row["name"], f"{1e3 * compiled:.1f}"])
        rows[-1] += [_number(row["of_compiled"].get(way, math.nan), 2) for way in ways]
        rows[-1].append(_number(row["seconds"]["plain"] / row["seconds"].get("products", math.nan), 2))
    columns = [("stage of", "left"), ("compiled, ms", "right"), *((way, "right") for way in ways)]
    columns.append(("plain over products and attention", "right"))
    every = [row["commit"] for row in report["rows"]]
    every += [commit for row in report["rows"] for commit in row.get("ways_commits", {}).values()]
    commits = ", ".join(dict.fromkeys(each[:12] for each in every))
    caption = (
        "Times over that of transformers' layers under `torch.compile`, a microbatch of 8,192 tokens forward "
        'and backward, four blocks. *All products*: also `training.weight_gradients = "fp8"`. *Torchao*: '
        "the compiled layers with its recipe `tensorwise`, all products in FP8, one scale a tensor. "
        f"{report['hardware']}, median of {report['rows'][0]['runs']}, torch {report['torch']}, commits "
        f"{commits}."
    )
    return f"{markdown(columns, rows)}\n\n{fill(caption, 118)}"


def fp8_loss() -> str:
    """Losses with products in FP8: the suite `compute` of scripts/experiments/convergence.py."""
    report = read_report(FP8_LOSS)
    found = {(run["memory"], run["seed"]): run["loss_valid"] for run in report["runs"]}
    seeds = sorted({seed for _, seed in found})
    rows = []
    for way, words in FP8_WAYS.items():
        cells, changes = [], []
        for seed in seeds:
            loss, plain = found.get((way, seed)), found["plain", seed]
            cells.append("-" if loss is None else f"{loss:.4f}")
            if loss is not None and way != "plain":
                changes.append(loss / plain - 1)
        change = f"{100 * sum(changes) / len(changes):+.2f} %" if changes else ""
        rows.append([words, *cells, change])
    columns = [("products", "left"), *((f"held-out loss, seed {seed}", "right") for seed in seeds)]
    columns += [("mean change", "right")]
    plain = [found["plain", seed] for seed in seeds]
    tokens = report["runs"][0]["steps"] * report["tokens_a_step"] / 1e6
    commits = ", ".join(dict.fromkeys(run["commit"][:12] for run in report["runs"]))
    caption = (
        f"124 million parameters, {tokens:.0f} million tokens of books, one stage as a node computes it. "
        f"Seeds of bf16 lie {100 * (max(plain) / min(plain) - 1):.2f} % apart. {report['hardware']}, torch "
        f"{report['versions']['torch']}, commits {commits}."
    )
    return f"{markdown(columns, rows)}\n\n{fill(caption, 118)}"


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
    if again := report.get("again"):
        caption += f" `{again['file']}` ran again at commit {again['commit'][:12]}: {again['why']}."
    for later in report.get("later", ()):
        counts = ", ".join(f"{count} {word}" for word, count in later["outcomes"].items())
        caption += f" At commit {later['commit'][:12]}, on one such GPU: {later['what']}, {counts}."
    for outcome in ("failure", "error"):
        if named := report["others"].get(outcome):
            caption += f" {OUTCOMES[outcome].capitalize()}: {', '.join(f'`{name}`' for name in named)}."
    return f"{markdown(columns, rows)}\n\n{caption}"


TABLES: Tables = {
    "stage_compute": stage_compute,
    "captured_passes": captured_passes,
    **if_recorded(WHOLE_MODEL, "whole_model", whole_model),
    **if_recorded(WHOLE_MODEL_H100, "whole_model_newer", whole_model_newer),
    "coded_products": fp8_compute,
    "coded_loss": fp8_loss,
    **if_recorded(GPU_TESTS, "gpu_tests", gpu_tests),
}
