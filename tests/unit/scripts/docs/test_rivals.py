"""The tables of installable quantizers beside the codecs: a CPU's report, and a GPU's when there is one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import rival_quantizers
from scripts.bench import rivals as bench
from scripts.docs import codecs, markdown

METHODS = {method.name: method for method in rival_quantizers.ours()}
TENSORS = {
    kind: [torch.linspace(-1, 1, 8192).view(1, 4, 2048) ** power]
    for kind, power in (("activation", 1), ("gradient", 3))
}


def report(device: str, *names: str, **times: float) -> dict[str, Any]:
    """What the script makes of these codecs of ours, with made-up times and hardware."""
    results, speeds = [], []
    for name in names:
        results += bench.measure(METHODS[name], TENSORS, "cpu")
        timing = bench.speed(METHODS[name], TENSORS["activation"][0], "cpu")
        assert timing.keys() >= times.keys()
        speeds.append(timing | times)
    skipped = [{"package": "hivemind", "method": "all", "reason": "ImportError: no hivemind"}]
    made = bench.report(
        device,
        hardware="A  machine",
        load=0.25,
        data=["boundaries-step1.safetensors"],
        results=results,
        speeds=speeds,
        skipped=skipped,
    )
    return made | {"commit": "0123456789abcdef", "versions": {"torch": "2.13.0", "hivemind": "not installed"}}


def written(path: Path, made: dict[str, Any]) -> Path:
    path.write_text(json.dumps(made), encoding="utf-8")
    return path


def test_a_cpus_times_are_nanoseconds_an_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"encode_nanoseconds_per_element": 4.04, "decode_nanoseconds_per_element": 2.5}
    made = report("cpu", "fixed-8", **times)
    made["results"][1]["relative_error"] = None
    monkeypatch.setattr(codecs, "RIVALS", written(tmp_path / "rivals.json", made))
    lines = codecs.rivals().splitlines()
    assert lines[0].endswith("| encode, ns an element | decode, ns an element |")
    assert lines[2].startswith("| thinwire | fixed-8 | 8.") and lines[2].endswith(
        "| not finite | 4.0 | 2.5 |"
    )
    assert "A machine, 1 thread, least of 5 runs, load average 0.2 before; torch 2.13.0" in lines[-1]
    assert lines[-1].endswith("Not measured: hivemind, all: ImportError: no hivemind.")


def test_a_gpus_times_are_microseconds_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "elements": 1 << 24,
        "encode_nanoseconds_per_element": 0.0125,
        "decode_nanoseconds_per_element": 0.00235,
    }
    made = report("cuda", "fixed-8", "fixed-4", **times)
    monkeypatch.setattr(codecs, "RIVALS_GPU", written(tmp_path / "rivals_gpu.json", made))
    lines = codecs.rivals_gpu().splitlines()
    assert lines[0].endswith("| encode, microseconds | decode, microseconds |")
    assert [line.split(" | ")[1] for line in lines[2:4]] == ["fixed-8", "fixed-4"]
    assert lines[3].endswith(" | 209.7 | 39.4 |")
    assert "16,777,216 elements" in lines[-1] and "least of 25 runs" in lines[-1]
    assert "A machine; torch 2.13.0, hivemind not installed; commit 0123456789ab." in lines[-1]


def test_a_table_without_results_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rivals_gpu.json"
    assert markdown.if_recorded(path, "rivals_gpu", codecs.rivals_gpu) == {}
    path.touch()
    assert markdown.if_recorded(path, "rivals_gpu", codecs.rivals_gpu) == {"rivals_gpu": codecs.rivals_gpu}


def test_a_gpus_report_does_not_take_a_cpus_place() -> None:
    assert bench.OUT == {"cpu": codecs.RIVALS, "cuda": codecs.RIVALS_GPU}
