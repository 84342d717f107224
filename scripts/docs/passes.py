"""Tables of a stage's passes on GPUs: compute, CUDA graphs, and the outcomes of tests/gpu."""

import math
from textwrap import fill

from scripts.docs.markdown import Tables, commit, if_recorded, notes, read_report, spaced
from scripts.report import RESULTS, markdown

COMPUTE = RESULTS / "compute.json"
FP8_LOSS = RESULTS / "fp8_loss.json"
FP8_WAYS = {
    "plain": "bf16",
    "fp8": "FP8, gradients of weights in bf16",
    "fp8-three": "the same, with `agoq`, gradients and moments in FP8",
}
WHOLE_MODEL = RESULTS / "whole_model.json"
GPU_TESTS = RESULTS / "gpu_tests.json"
PLAIN_TESTS = RESULTS / "gpu_tests_plain.json"
MIXTURE_STAGE = RESULTS / "mixture_stage.json"
WAYS = {
    "all": "thinwire, adapters on all projections",
    "attention": "thinwire, adapters on attention's",
    "peft": "transformers with PEFT, adapters on attention's and experts'",
    "transformers": "transformers, nothing trained",
}
OUTCOMES = {"passed": "passed", "skipped": "skipped", "failure": "failed", "error": "erred"}
"""Words for the outcomes, by their names in the record."""
SHARED_BY = {
    "test_gpu_group::test_gpus_do_as_one": "data parallel",
    "test_gpu_tensor_group::test_gpus_that_share_blocks_do_as_one": "tensor parallel",
}
"""The tests that compare GPUs sharing a stage with one GPU, and how their GPUs share it."""


def stage_compute() -> str:
    """A stage's time a microbatch beside compiled layers and products: scripts/bench/compute.py."""
    report = read_report(COMPUTE)
    ways = ("plain", "plain, any order", "agoq", "fp8", "fp8, any order", "fp8, agoq", "fp8, all products")
    ways += ("fp8, all products, any order", "compiled, fixed order", "compiled, torchao")
    rows = []
    for row in report["rows"]:
        seconds = row["seconds"]
        rows.append(
            [row["name"], *(f"{1e3 * seconds[way]:.1f}" for way in ("compiled, fastest", "products"))]
        )
        rows[-1] += [_number(row["of_compiled"].get(way, math.nan), 3) for way in ways]
        rows[-1].append(f"{seconds['plain'] / seconds['products']:.2f}")
    columns = [("stage of", "left"), ("compiled, ms", "right"), ("products, ms", "right")]
    columns += [*((way, "right") for way in ways), ("plain over products", "right")]
    (tokens,) = {row["tokens"] for row in report["rows"]}
    every = [row["commit"] for row in report["rows"]]
    every += [commit for row in report["rows"] for commit in row.get("ways_commits", {}).values()]
    commits = ", ".join(dict.fromkeys(each[:12] for each in every))
    caption = f"""A microbatch of {tokens:,} tokens forward and backward, four blocks; each way as a share of
*compiled*: transformers' decoder layers under `torch.compile` in bf16, with the attention that torch prefers,
whose backward does not repeat its bits. *Any order*: our stage with `training.deterministic = false`. *All
products*: also `training.weight_gradients = "fp8"`. `agoq` also has gradients and moments in FP8 and weights
in bf16. *Compiled, torchao*: the compiled layers with its recipe `tensorwise`, all products in FP8, one scale
a tensor. *Products*: the matrix products in bf16 and our attention, nothing else. {report["hardware"]},
median of {report["rows"][0]["runs"]}, torch {report["torch"]}, commits {commits}. At 1B what
is in any order, has all products in FP8 or `agoq` with FP8, and at 8B FP8 in any order, was timed on another
machine of the kind, whose processors had other work."""
    return f"{markdown(columns, rows)}\n\n{caption}"


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def whole_model() -> str:
    """Steps of a whole model on one GPU beside a compiled transformers loop: scripts/bench/whole_model.py."""
    report = read_report(WHOLE_MODEL)
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
    (size,) = {row["tokens"] for row in report["rows"]}
    commits = ", ".join(dict.fromkeys(row["commit"][:12] for row in report["rows"]))
    return f"""{markdown(columns, rows)}

Steps of {size:,} tokens, AdamW on float32 weights, clipping; *compiled* is transformers' model in bf16
autocast, each layer under `torch.compile`, with torch's fused AdamW. The first step compiles kernels, the
second captures graphs. {report["hardware"]}, median of {report["rows"][0]["runs"]}, torch
{report["torch"]}, commits {commits}."""


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


def mixture_stage() -> str:
    """A stage of a mixture beside transformers (scripts/bench/mixture_stage.py)."""
    report = read_report(MIXTURE_STAGE)
    columns = [("tokens", "right"), ("way", "left")]
    columns += [(name, "right") for name in ("forward, ms", "backward, ms", "both", "peak, GB")]
    seconds = {
        (row["tokens"], row["way"]): row["forward_seconds"] + row["backward_seconds"]
        for row in report["rows"]
    }
    rows = [
        [
            f"{row['tokens']:,}",
            WAYS[row["way"]],
            f"{1e3 * row['forward_seconds']:.1f}",
            f"{1e3 * row['backward_seconds']:.1f}",
            f"{seconds[row['tokens'], row['way']] / seconds[row['tokens'], 'all']:.2f}",
            f"{row['peak_bytes'] / 1e9:.1f}",
        ]
        for row in sorted(report["rows"], key=lambda row: row["tokens"])
    ]
    blocks = report["rows"][0]["blocks"]
    caption = (
        f"One stage alone: {blocks} of Qwen3-30B-A3B's 48 blocks, random weights, adapters of rank 8. "
        f"thinwire has the weights in {report['base']} bits and stores activations packed, transformers has "
        "bf16 and `grouped_mm`. `both` is relative to the first. Peaks include what earlier ways left "
        f"allocated. {spaced(report['hardware'])}, torch {report['torch']}, transformers "
        f"{report['transformers']}, commit {commit(report)}."
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
    if later := report.get("later"):
        counts = ", ".join(
            f"{later['outcomes'][outcome]} {word}"
            for outcome, word in OUTCOMES.items()
            if outcome in later["outcomes"]
        )
        if unfinished := later.get("not_run"):
            counts += f", without {', '.join(f'`{name}`' for name in unfinished)}"
        caption += f" At commit {later['commit'][:12]}, on {later['gpus']} x {later['hardware']}: {counts}."
    for outcome in ("failure", "error"):
        if named := report["others"].get(outcome):
            caption += f" {OUTCOMES[outcome].capitalize()}: {', '.join(f'`{name}`' for name in named)}."
    return f"{markdown(columns, rows)}\n\n{caption}"


def plain_tests() -> str:
    """Outcomes of tests/gpu without the kernels of one part at a time (scripts/checks/gpu_tests.py)."""
    report = read_report(PLAIN_TESTS)
    rows = [
        [f"`{part}`", *(str(of["outcomes"].get(outcome, 0)) for outcome in OUTCOMES)]
        for part, of in report["plain"].items()
    ]
    columns = [("without the kernels of", "left"), *((word, "right") for word in OUTCOMES.values())]
    caption = (
        "The tests that use these kernels; plain torch does their work, as on a card whose self-test found "
        f"them wrong. {report['gpus']} x {spaced(report['hardware'])}, torch {report['versions']['torch']}, "
        f"commit {commit(report)}.{notes(report)}"
    )
    return f"{markdown(columns, rows)}\n\n{fill(caption, 118)}"


TABLES: Tables = {
    "stage_compute": stage_compute,
    **if_recorded(WHOLE_MODEL, "whole_model", whole_model),
    "coded_loss": fp8_loss,
    **if_recorded(GPU_TESTS, "gpu_tests", gpu_tests),
    **if_recorded(MIXTURE_STAGE, "mixture_stage", mixture_stage),
    **if_recorded(PLAIN_TESTS, "gpu_tests_plain", plain_tests),
}
