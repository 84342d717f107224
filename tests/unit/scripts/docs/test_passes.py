"""The table of tests/gpu: how far GPUs that share a stage are from one, and which tests did not pass."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.docs import passes

GROUP = "test_gpu_group::test_gpus_do_as_one"
TENSOR_GROUP = "test_gpu_tensor_group::test_gpus_that_share_blocks_do_as_one"
REPORT: dict[str, Any] = {
    "commit": "0123456789abcdef",
    "hardware": "A  GPU",
    "gpus": 4,
    "versions": {"python": "3.12.3", "torch": "2.13.0"},
    "outcomes": {"passed": 120},
    "others": {},
    "recorded": [],
}


def recorded(test: str, difference: float, outcome: str = "passed") -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "largest_relative_difference": difference}


def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    path = tmp_path / "gpu_tests.json"
    path.write_text(json.dumps({**REPORT, **changes}), encoding="utf-8")
    monkeypatch.setattr(passes, "GPU_TESTS", path)
    return passes.gpu_tests().splitlines()


def test_each_comparison_with_one_gpu_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        recorded(f"{GROUP}[2-float32]", 0.0),
        recorded(f"{GROUP}[4-fp8]", 0.00123),
        recorded(f"{TENSOR_GROUP}[2-llama]", 3.14e-6),
        recorded(f"{TENSOR_GROUP}[2 x 2-stored]", 2e-5),
        recorded(f"{TENSOR_GROUP}[4-gpt2]", 4.56e-4),
        recorded("test_gpu_other::test_a_near_link_is_not_named", 0.5),
        {"test": f"{GROUP}[2-fp8]", "outcome": "passed", "seconds": 1.0},
    ]
    lines = table(tmp_path, monkeypatch, recorded=rows)
    assert lines == [
        "| GPUs | shared by | run | largest relative difference of a loss |",
        "|--:|---|---|--:|",
        "| 2 | data parallel | float32 | 0 |",
        "| 4 | data parallel | fp8 | 1.2e-03 |",
        "| 2 | tensor parallel | llama | 3.1e-06 |",
        "| 4 | 2 tensor parallel x 2 data parallel | stored | 2.0e-05 |",
        "| 4 | tensor parallel | gpt2 | 4.6e-04 |",
        "",
        "Differences are from the losses of the same run on one GPU. Of the tests in tests/gpu, 120 passed: "
        "4 x A GPU, torch 2.13.0, commit 0123456789ab.",
    ]


def test_failures_are_named_and_skips_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, erred = f"{GROUP}[2-fp8]", "test_gpu_run::test_run"
    lines = table(
        tmp_path,
        monkeypatch,
        outcomes={"skipped": 3, "passed": 115, "error": 1, "failure": 1},
        others={"skipped": [f"{GROUP}[4-fp8]"] * 3, "failure": [failed], "error": [erred]},
        recorded=[recorded(failed, 0.5, "failure")],
    )
    assert lines[2] == "| 2 | data parallel | fp8 | 5.0e-01 |"
    assert "tests/gpu, 115 passed, 3 skipped, 1 failed, 1 erred: 4 x A GPU" in lines[-1]
    assert lines[-1].endswith(f"commit 0123456789ab. Failed: `{failed}`. Erred: `{erred}`.")
    assert "[4-fp8]" not in lines[-1]
