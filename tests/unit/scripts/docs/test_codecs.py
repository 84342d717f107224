"""Tables of codecs on GPUs and on two cores, from recorded benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import gpu_trellis as bench
from scripts.docs import codecs, program

ROOT = Path(__file__).resolve().parents[4]

REPORT: dict[str, Any] = {
    "commit": "0123456789abcdef",
    "hardware": "A GPU",
    "torch": "2",
    "python": "3",
    "triton": "3.6",
    "runs": 9,
}


def recorded(path: Path, report: dict[str, Any]) -> Path:
    path.write_text(json.dumps({**REPORT, **report}), encoding="utf-8")
    return path


def test_bits_compared_are_said_or_said_not_to_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path / "a.json", {"bits": {"compared": 132, "different": 0}, "rows": []})
    monkeypatch.setattr(codecs, "GPU_TRELLIS", path)
    assert codecs.trellis_bits() == "132 tensors compared, 0 differ (A GPU, commit 0123456789ab)."
    recorded(path, {"rows": []})
    assert "how many tensors it compared is not recorded" in codecs.trellis_bits()


def test_what_differs_is_counted_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU in place of the GPU, with a graph that is none: what the script counts of what it is given."""
    x = torch.linspace(-1, 1, 640).view(10, 64)
    given = [("right", x, "trellis-4.41"), ("wrong", x + 1, "trellis-4.41")]
    monkeypatch.setattr(bench, "checked", lambda: iter(given))

    class Graph:
        def replay(self) -> None:
            pass

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self.clone())
    held: list[torch.Tensor] = []

    def graph_of(name: str, tensor: torch.Tensor) -> tuple[Graph, torch.Tensor]:
        held.append(tensor)
        packed = bench.codec(name).pack(given[len(held) - 1][1])
        return Graph(), packed if len(held) == 1 else torch.zeros_like(packed)

    monkeypatch.setattr(bench, "graph_of", graph_of)
    assert bench.check() == {"compared": 2, "different": 1}


def test_two_threads_are_timed_by_wall_and_by_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = bench.boundary((1, 96, 64), "cpu")
    row = bench.time_one("trellis-4.41", x, 3)
    for way in ("encode", "decode"):
        assert 0 < row[f"{way}_least_seconds"] <= row[f"{way}_seconds"]
        assert row[f"{way}_processor_seconds"] > 0
    assert row["device"] == "cpu" and 0 < row["relative_error"] < 0.2 and row["load_before"] >= 0
    row |= {"encode_seconds": 1e-3, "encode_processor_seconds": 2e-3, "bits_per_element": 4.0}
    path = recorded(tmp_path / "cpu.json", {"threads": 2, "rows": [row]})
    monkeypatch.setattr(codecs, "CPU_TRELLIS", path)
    line = codecs.trellis_cpu().splitlines()[2]
    # 6144 elements in a millisecond on the wall, in two of processor time by two threads.
    assert line.startswith("| 1 x 96 x 64 | `trellis-4.41` |") and "| 1.0 | 6.1 | 6.1 | 25 |" in line


def test_a_gpus_table_has_only_that_gpus_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {f"{way}_{what}": 1e-3 for way in ("encode", "decode") for what in ("seconds", "kernel_seconds")}
    row = {
        "device": "cuda",
        "shape": [1, 1000],
        "codec": "trellis-3.45",
        "relative_error": 0.1,
        "encode_graph_seconds": 2e-3,
        "encode_launches": 86,
        **times,
    }
    path = recorded(tmp_path / "a.json", {"rows": [row, {**row, "device": "cpu"}]})
    monkeypatch.setattr(codecs, "GPU_TRELLIS", path)
    lines = codecs.trellis_speed().splitlines()
    assert lines[2] == "| 1 x 1000 | `trellis-3.45` | 0.1000 | 1.0 | 1.0 | 1 | 2.0 | 86 | 1.0 | 1.0 | 1 |"
    assert lines[3] == ""


def test_kernels_are_listed_with_times_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"shape": [8, 64], "way": "encode", "seconds": 1e-5, "of_copy": 0.8444, "target": 0.85}
    times = [
        {**row, "codec": "tah", "kernels_microseconds": {"_measure": 36.79, "_rank": 8.85}},
        {**row, "codec": "fixed-6", "kernels_microseconds": {"_quantize": 1.0}},
    ]
    checks = {"a": {"last": ["a: 300 checks, 0 failed"]}, "b": {"last": ["b: 29 checks, 1 failed"]}}
    path = recorded(tmp_path / "a.json", {"dtype": "bf16", "times": times, "checks": checks})
    monkeypatch.setattr(codecs, "GPU_CODEC_SPEED", path)
    assert codecs.gpu_codec_kernels().splitlines()[2:4] == [
        "| 8 x 64 | `tah` | encode | `_measure` 36.8, `_rank` 8.8 |",
        "",
    ]
    assert codecs.gpu_codec_speed().splitlines()[2] == "| 8 x 64 | `tah` | encode | 10.0 | 84.4 % | 85 % |"
    assert "329 checks of bits and guards, 1 failed." in codecs.gpu_codec_speed()


def test_equal_elements_by_trellis() -> None:
    lines = program.trellis_constants().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[0] for row in rows] == ["8", "64", "16 x 16", "33 x 31", "64 x 96", "128 x 256"]
    assert rows[0][1:] == ["0.0000"] * 4
    for row in rows[1:]:
        errors = [float(cell) for cell in row[1:]]
        # Neither exact nor refused: less with more bits.
        assert 0.35 > errors[0] > errors[1] > errors[2] > errors[3] > 0
