"""Tables of the codecs' speed, size and error, from recorded benchmarks."""

import math

from scripts.docs.markdown import Tables, commit, read_report, spaced
from scripts.report import RESULTS, markdown

CODEC_SPEED = RESULTS / "codec_speed.json"
GPU_CODEC_SPEED = RESULTS / "gpu_codecs.json"
GPU_TRELLIS = RESULTS / "gpu_trellis.json"
CPU_TRELLIS = RESULTS / "trellis_cpu.json"
SANITIZER = RESULTS / "sanitizer.json"


def codec_speed() -> str:
    """Results of `make bench`. Processor time, because it also holds on a busy machine."""
    report = read_report(CODEC_SPEED)
    rows = [
        [
            f"`{row['codec']}`",
            f"{row['encode_cpu_nanoseconds_per_element']:.2f}",
            f"{row['decode_cpu_nanoseconds_per_element']:.2f}",
            f"{row['bits_per_element']:.3f}",
            f"{row['relative_error']:.4f}",
        ]
        for row in report["results"]
    ]
    headings = (
        "encode, CPU ns per element",
        "decode, CPU ns per element",
        "bits per element",
        "relative error",
    )
    shape = " x ".join(map(str, report["shape"]))
    threads = f"{report['threads']} thread" + ("s" if report["threads"] > 1 else "")
    caption = (
        f"{shape} {report['dtype']}, {spaced(report['hardware'])}, {threads}, "
        f"load average {report['load_before']:.1f} before, median of {report['runs']} runs, "
        f"torch {report['torch']}, Python {report['python']}, "
        f"commit {commit(report)}."
    )
    columns = [("codec", "left"), *((heading, "right") for heading in headings)]
    return markdown(columns, rows) + "\n\n" + caption


def gpu_codec_speed() -> str:
    """Results of scripts/bench/gpu_codecs.py: kernels against a copy timed in the same run."""
    report = read_report(GPU_CODEC_SPEED)
    rows = [
        [
            " x ".join(map(str, row["shape"])),
            f"`{row['codec']}`",
            row["way"],
            f"{1e6 * row['seconds']:.1f}",
            f"{100 * row['of_copy']:.1f} %",
            f"{100 * row['target']:.0f} %",
        ]
        for row in report["times"]
    ]
    columns = [("shape", "left"), ("codec", "left"), ("way", "left")]
    columns += [("microseconds", "right"), ("of a copy's bandwidth", "right"), ("aim", "right")]
    caption = (
        f"{report['dtype']}, CUDA graphs, {report['hardware']}, median of {report['runs']} runs, "
        f"torch {report['torch']}, Triton {report['triton']}, commit {commit(report)}. Bandwidth "
        "counts the bytes that must move; the copy is device to device, timed in the same run."
    )
    return markdown(columns, rows) + "\n\n" + caption


def gpu_codec_kernels() -> str:
    """Each kernel of the same report by itself."""
    report = read_report(GPU_CODEC_SPEED)
    rows = [
        [
            " x ".join(map(str, row["shape"])),
            f"`{row['codec']}`",
            row["way"],
            ", ".join(f"`{name}` {taken:.1f}" for name, taken in row["kernels_microseconds"].items()),
        ]
        for row in report["times"]
        if row["codec"] in ("fixed-4", "tah")
    ]
    columns = [("shape", "left"), ("codec", "left"), ("way", "left"), ("kernels, microseconds", "left")]
    caption = (
        "From a trace of calls on one tensor, so that some of the smaller one is still in the cache; the "
        f"same run, commit {commit(report)}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def trellis_speed() -> str:
    """Results of scripts/bench/gpu_trellis.py on a GPU."""
    report = read_report(GPU_TRELLIS)
    rows = []
    for row in report["rows"]:
        # Reports of earlier versions of the script also have rows of a CPU.
        if row["device"] != "cuda":
            continue
        elements = math.prod(row["shape"])
        line = [" x ".join(map(str, row["shape"])), f"`{row['codec']}`", f"{row['relative_error']:.4f}"]
        for way in ("encode", "decode"):
            line += [f"{1e3 * row[f'{way}_{which}']:.1f}" for which in ("seconds", "kernel_seconds")]
            line += [f"{elements / row[f'{way}_seconds'] / 1e6:.0f}"]
            if way == "encode":
                line += [f"{1e3 * row['encode_graph_seconds']:.1f}", str(row["encode_launches"])]
        rows.append(line)
    columns = [("shape", "left"), ("codec", "left"), ("relative error", "right")]
    for way in ("encode", "decode"):
        columns += [(f"{way}, ms", "right"), ("kernels alone", "right"), ("M elements/s", "right")]
        if way == "encode":
            columns += [("in a graph, ms", "right"), ("launches", "right")]
    caption = (
        f"bf16, {report['hardware']}. Wall time, waits for the device included, median of {report['runs']} "
        f"runs, torch {report['torch']}, Python {report['python']}, commit {commit(report)}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def trellis_cpu() -> str:
    """Results of the same script's `--cpu`: two threads, and the rate of the link that they fill."""
    report = read_report(CPU_TRELLIS)
    rows = []
    for row in report["rows"]:
        elements, threads = math.prod(row["shape"]), report["threads"]
        line = [" x ".join(map(str, row["shape"])), f"`{row['codec']}`", f"{row['relative_error']:.4f}"]
        for way in ("encode", "decode"):
            taken, busy = row[f"{way}_seconds"], row[f"{way}_processor_seconds"]
            line += [f"{1e3 * taken:.1f}", f"{elements / taken / 1e6:.1f}"]
            line += [f"{elements / busy * threads / 1e6:.1f}"]
            if way == "encode":
                line += [f"{row['bits_per_element'] * elements / taken / 1e6:.0f}"]
        rows.append(line)
    columns = [("shape", "left"), ("codec", "left"), ("relative error", "right")]
    for way in ("encode", "decode"):
        columns += [(f"{way}, ms", "right"), ("M elements/s", "right"), ("by processor time", "right")]
        if way == "encode":
            columns += [("fills, Mbit/s", "right")]
    loads = [row["load_before"] for row in report["rows"]]
    caption = (
        f"bf16, {report['hardware']}, {report['threads']} threads, load average {min(loads):.1f} to "
        f"{max(loads):.1f} before. Wall time; *by processor time*: what "
        f"two cores would do whose threads never wait; medians of {report['runs']} runs. torch "
        f"{report['torch']}, Python {report['python']}, commit {commit(report)}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def sanitizer() -> str:
    """Results of `scripts/checks/sanitizer.py`: one sentence per tool."""
    if not SANITIZER.exists():
        return "No run under compute-sanitizer is recorded."
    report = read_report(SANITIZER)
    said = []
    for tool in ("memcheck", "racecheck"):
        rows = [row for row in report["parts"] if row["tool"] == tool]
        if not rows:
            continue
        whole = [row for row in rows if row["errors"] is not None]
        late = f"; {len(rows) - len(whole)} of {len(rows)} parts did not finish" if whole != rows else ""
        cases, checks, failed = (sum(row[key] for row in whole) for key in ("cases", "checks", "failed"))
        said.append(
            f"{tool}: {sum(row['errors'] for row in whole)} errors in {cases} cases ({checks} checks of "
            f"bits and guards, {failed} failed){late}."
        )
    return (
        f"Under compute-sanitizer {report['sanitizer']}, `tah`, `fixed-b` and `trellis`, small odd shapes, "
        f"three dtypes, every tensor an allocation of its own: {' '.join(said)}\n\n"
        f"{report['hardware']}, torch {report['torch']}, Triton {report['triton']}, commit {commit(report)}."
    )


TABLES: Tables = {
    "codec_speed": codec_speed,
    "gpu_codec_speed": gpu_codec_speed,
    "gpu_codec_kernels": gpu_codec_kernels,
    "trellis_speed": trellis_speed,
    "trellis_cpu": trellis_cpu,
    "sanitizer": sanitizer,
}
