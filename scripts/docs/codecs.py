"""Tables of the codecs' speed, size and error, from recorded benchmarks."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from scripts.docs.markdown import Tables, commit, if_recorded, read_report, spaced
from scripts.report import RESULTS, markdown

CODEC_SPEED = RESULTS / "codec_speed.json"
GPU_CODEC_SPEED = RESULTS / "gpu_codecs.json"
GPU_TRELLIS = RESULTS / "gpu_trellis.json"
CPU_TRELLIS = RESULTS / "trellis_cpu.json"
PACKING_OVERHEAD = RESULTS / "packing_overhead.json"
TAH_ABLATION = RESULTS / "tah_ablation.json"
CODEC_CHOICES = RESULTS / "codec_choices.json"
SANITIZER = RESULTS / "sanitizer.json"
RIVALS = RESULTS / "rivals.json"
RIVALS_GPU = RESULTS / "rivals_gpu.json"


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
    headings = ("encode, CPU ns an element", "decode, CPU ns an element", "bits an element", "relative error")
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
    said = [re.search(r"(\d+) checks, (\d+) failed", part["last"][-1]) for part in report["checks"].values()]
    checks, failed = (sum(int(one[place]) for one in said if one) for place in (1, 2))
    caption = (
        f"{report['dtype']}, CUDA graphs, {report['hardware']}, median of {report['runs']} runs, "
        f"torch {report['torch']}, Triton {report['triton']}, commit {commit(report)}. Bandwidth "
        "counts the bytes that must move; the copy is device to device, timed in the same run. Before, "
        f"{checks} checks of bits and guards, {failed} failed."
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


def trellis_bits() -> str:
    """Sentence on the tensors that scripts/bench/gpu_trellis.py compared with the CPU's."""
    report = read_report(GPU_TRELLIS)
    where = f"{report['hardware']}, commit {commit(report)}"
    if "bits" not in report:
        # Older reports have no count; the script times nothing if a tensor differs.
        return f"It times nothing if any bit differs; how many tensors it compared is not recorded ({where})."
    bits = report["bits"]
    return f"{bits['compared']} tensors compared, {bits['different']} differ ({where})."


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
    """Results of `scripts/bench/gpu_codecs.py --sanitize`: one sentence per tool."""
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


def packing_overhead() -> str:
    """What packing costs: its time against a stage's compute per microbatch."""
    report = read_report(PACKING_OVERHEAD)
    rows = [
        [
            row["dtype"],
            f"`{row['forward']}`",
            f"`{row['backward']}`",
            f"{1e6 * row['device_seconds']:.0f}",
            f"{100 * row['share']:.2f} %",
            f"{1e6 * row['wall_seconds']:.0f}",
            f"{100 * row['wall_share']:.2f} %",
        ]
        for row in report["rows"]
    ]
    columns = [("boundary", "left"), ("activations", "left"), ("gradients", "left")]
    columns += [("kernels, microseconds", "right"), ("of the stage", "right")]
    columns += [("with the host, microseconds", "right"), ("of the stage", "right")]
    caption = (
        f"A microbatch of {' x '.join(map(str, report['shape']))} through {report['layers']} layers in "
        f"{report['stages']} stages: forward and backward of a stage take "
        f"{1e3 * report['stage_seconds']:.1f} ms. Encoding and decoding both; {report['hardware']}, median "
        f"of {report['runs']} runs, torch {report['torch']}, Triton {report['triton']}, "
        f"commit {commit(report)}."
    )
    made = markdown(columns, rows) + "\n\n" + caption
    # Reports of earlier versions of the script have none.
    return f"{made}\n\n{_together(report['together'])}" if report.get("together") else made


def _together(found: Sequence[dict[str, Any]]) -> str:
    """The stage alone, and while another thread packs: one row per pair of codecs."""
    rows = [
        [
            f"`{row['forward']}`",
            f"`{row['backward']}`",
            f"{1e3 * row['stage_seconds']:.2f}",
            f"{1e3 * row['beside_seconds']:.2f}",
            f"{100 * row['share']:+.2f} %",
        ]
        for row in found
    ]
    columns = [("activations", "left"), ("gradients", "left"), ("the stage alone, ms", "right")]
    columns += [("beside packing, ms", "right"), ("takes longer", "right")]
    caption = (
        "Together: the same stage computes as in a node, by CUDA graphs, and beside each microbatch another "
        "thread packs and unpacks one's activations and gradients, float32, on a stream of its own. Wall "
        "time of a microbatch, medians of "
        f"{found[0]['runs']} turns each; *takes longer* is the median over pairs of turns."
    )
    return markdown(columns, rows) + "\n\n" + caption


def tah_ablation() -> str:
    """Errors of TAH-Quant's settings, then of every codec."""
    report = read_report(TAH_ABLATION)
    kinds = ("activation", "gradient", "outlier")
    names = dict.fromkeys((row["group"], row["name"]) for row in report["results"])
    by_key = {(row["group"], row["name"], row["kind"]): row for row in report["results"]}
    rows = []
    for group, name in names:
        found = [by_key.get((group, name, kind)) for kind in kinds]
        first = next(row for row in found if row is not None)
        rows.append([group, name, f"{first['bits_per_element']:.2f}"])
        rows[-1] += ["-" if row is None else f"{row['relative_error']:.4f}" for row in found]
    columns = [("varied", "left"), ("setting or codec", "left"), ("bits an element", "right")]
    columns += [(f"error, {words}", "right") for words in ("activations", "gradients", "with outliers")]
    tensors = max(row["tensors"] for row in report["results"])
    caption = (
        f"Relative error of {tensors} tensors of each kind of {', '.join(report['data'])}; torch "
        f"{report['torch']}, Python {report['python']}, "
        f"commit {commit(report)}."
    )
    if "off_centre_commit" in report:
        caption += f" Tiles off centre: commit {commit({'commit': report['off_centre_commit']})}."
    return markdown(columns, rows) + "\n\n" + caption


def codec_choices() -> str:
    """Errors of ways of coding, by kind of tensor and rate."""
    report = read_report(CODEC_CHOICES)
    by_key = {
        (row["way"], row["kind"], row["file"], row["rate"]): row["relative_error"]
        for row in report["results"]
    }
    rates = list(dict.fromkeys(row["rate"] for row in report["results"]))
    kinds = list(dict.fromkeys((row["kind"], row["file"]) for row in report["results"]))
    columns = [("way of coding", "left")]
    columns += [
        (f"{kind}s, {file.removeprefix('boundaries-').partition('.')[0]}, {rate} bits", "right")
        for rate in rates
        for kind, file in kinds
    ]
    rows = []
    for way in dict.fromkeys(row["way"] for row in report["results"]):
        cells = [by_key.get((way, *kind, rate)) for rate in rates for kind in kinds]
        rows.append([way, *("-" if one is None else f"{one:.4f}" for one in cells)])
    tensors = max(row["tensors"] for row in report["results"])
    share = report["rows_with_their_token_before"]
    caption = (
        f"Relative error of {tensors} tensors of each kind at most at these bits, all metadata counted. "
        f"{100 * share:.0f} % of the rows have an earlier one of their token. torch {report['torch']}, "
        f"Python {report['python']}, commit {commit(report)}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def rivals() -> str:
    """Quantizers of other packages beside these codecs, on a CPU."""
    report = read_report(RIVALS)
    made = _rivals(report, "ns an element", lambda nanoseconds, _: f"{nanoseconds:.1f}")
    caption = (
        f"{', '.join(report['data'])}, {report['device']}, {spaced(report['hardware'])}, "
        f"{report['threads']} thread, least of {report['runs']} runs, load average "
        f"{report['load_before']:.1f} before; {_versions(report)}; "
        f"commit {commit(report)}."
    )
    if "trellis_commit" in report:
        # A later run may measure `trellis` alone, without the other packages installed.
        later = commit({"commit": report["trellis_commit"]})
        load = report["trellis_load_before"]
        caption += f" `trellis` was measured again at commit {later}, load average {load:.1f}."
    return f"{made}\n\n{caption}{_skipped(report)}"


def rivals_gpu() -> str:
    """The same on a GPU: bytes stay there, times are of one large tensor."""
    report = read_report(RIVALS_GPU)
    made = _rivals(
        report, "microseconds", lambda nanoseconds, elements: f"{nanoseconds * elements / 1e3:.1f}"
    )
    sizes = sorted({row["elements"] for row in report["speeds"]})
    caption = (
        f"Bits and errors of the tensors of {', '.join(report['data'])}. Times are of "
        f"{' and '.join(f'{size:,}' for size in sizes)} elements, those of the activations repeated, fp32: "
        f"wall time between two waits for the device, least of {report['runs']} runs; bytes stay there. "
        f"{spaced(report['hardware'])}; {_versions(report)}; commit {commit(report)}."
    )
    return f"{made}\n\n{caption}{_skipped(report)}"


def _rivals(report: dict[str, Any], unit: str, worded: Callable[[float, int], str]) -> str:
    """One row per method; `worded` formats nanoseconds per element, given the number of timed elements."""
    speeds = {(row["package"], row["method"]): row for row in report["speeds"]}
    by_key = {(row["package"], row["method"], row["kind"]): row for row in report["results"]}
    rows = []
    for package, method in dict.fromkeys((row["package"], row["method"]) for row in report["results"]):
        speed = speeds[package, method]
        errors = [by_key[package, method, kind]["relative_error"] for kind in ("activation", "gradient")]
        row = [package, method, f"{by_key[package, method, 'activation']['bits_per_element']:.3f}"]
        row += ["not finite" if error is None else f"{error:.4f}" for error in errors]
        for way in ("encode", "decode"):
            row.append(worded(speed[f"{way}_nanoseconds_per_element"], speed["elements"]))
        rows.append(row)
    columns = [("package", "left"), ("method", "left"), ("bits an element", "right")]
    columns += [("error, activations", "right"), ("error, gradients", "right")]
    columns += [(f"encode, {unit}", "right"), (f"decode, {unit}", "right")]
    return markdown(columns, rows)


def _versions(report: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in report["versions"].items())


def _skipped(report: dict[str, Any]) -> str:
    """The end of a caption: methods that were not measured, with reasons."""
    return "".join(
        f" Not measured: {row['package']}, {row['method']}: {row['reason']}." for row in report["skipped"]
    )


TABLES: Tables = {
    "codec_speed": codec_speed,
    "gpu_codec_speed": gpu_codec_speed,
    "gpu_codec_kernels": gpu_codec_kernels,
    "trellis_bits": trellis_bits,
    "trellis_speed": trellis_speed,
    "trellis_cpu": trellis_cpu,
    "sanitizer": sanitizer,
    "packing_overhead": packing_overhead,
    "tah_ablation": tah_ablation,
    "codec_choices": codec_choices,
    "rivals": rivals,
} | if_recorded(RIVALS_GPU, "rivals_gpu", rivals_gpu)
