"""`thinwire plan`."""

import json

import pytest

from node.cli.main import main

RECIPE = "several-machines"
SMALL = "model.layers=8"
"""Two blocks a stage are enough for one that is planned unlike the other, and make short programs."""


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.tuning.memory_plan.CURVE_POINTS", 5)


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["plan", RECIPE, SMALL, *options])
    return code, capsys.readouterr().out


def test_a_plan_for_a_card_and_its_curve(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = plan(capsys, "--json")
    stages = json.loads(out)["stages"]
    assert code == 0 and len(stages) == 4
    most, curve = stages[0]["plan"]["bytes"], stages[0]["curve"]
    assert curve[0]["bytes"] == most and curve[0]["added_time"] == 0
    least = curve[-1]["bytes"]
    assert least < most and curve[-1]["added_time"] > 0

    between = f"{(least + most) / 2e9:.3f}"
    code, out = plan(capsys, "--gb", between, "--json")
    chosen = json.loads(out)["stages"][0]["plan"]
    assert code == 0 and chosen["fits"] and least <= chosen["bytes"] <= float(between) * 1e9
    assert chosen["blocks"] != curve[0]["blocks"] or chosen["moments_in_host_memory"]

    code, out = plan(capsys, "--gb", between, "--curve")
    assert code == 0 and f"4 stages, each on one GPU of {float(between):g} GB" in out
    assert out.count("+ 0.0%") == 4


def test_a_run_that_does_not_fit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = plan(capsys, "--gb", "0.3", "--device", "cpu")
    assert code == 1
    assert out.count("does not fit") == 4
    assert "more pipeline.stages" in out


@pytest.mark.parametrize("size", [["--gb", "-1"], ["--gb", "0"], ["--host-gb", "-1"]])
def test_a_size_that_is_none_is_refused(size: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, *size]) == 2
    assert f"{' '.join(size)} is no size" in capsys.readouterr().err


def test_main_memory_lets_a_stage_fit_in_less(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = plan(capsys, "--host-gb", "0", "--json")
    alone = json.loads(out)["stages"][0]["curve"][-1]["bytes"]
    _, out = plan(capsys, "--host-gb", "64", "--json")
    assert json.loads(out)["stages"][0]["curve"][-1]["bytes"] < alone

    code, out = plan(capsys, "--gb", f"{0.95 * alone / 1e9:.3f}", "--host-gb", "64")
    assert code == 0 and "in host memory" in out and "stage 0: " in out


def test_a_plan_says_in_how_many_bits_stages_store_and_what_would_let_one_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    allowed = ('storage.allow=["ffn_input:8", "ffn_input:4"]', "pipeline.window=0")
    _, out = plan(capsys, *allowed, "--gb", "80", "--json")
    wide = json.loads(out)["stages"]
    assert {stage["storage"] for stage in wide} == {"all as computed"}
    most = max(stage["plan"]["bytes"] for stage in wide)
    # With graphs everything kept takes more than the choice asks for.
    code, out = plan(capsys, *allowed, "training.cuda_graphs=false", "--gb", f"{0.97 * most / 1e9:.3f}")
    assert code == 0 and "storage that the coordinator would choose (storage.allow):" in out
    code, out = plan(capsys, *allowed, "--gb", "0.3", "--device", "cpu", "--json")
    found = json.loads(out)
    assert code == 1 and {stage["storage"] for stage in found["stages"]} == {"ffn_input in 4 bits"}
    assert found["what_fits"] == []
    # As computed a block may compute more again than in few bits, and so take less.
    _, out = plan(capsys, "pipeline.window=0", "--gb", "0.3", "--device", "cpu", "--json")
    both = zip(found["stages"], json.loads(out)["stages"], strict=True)
    least = max(min(stage["curve"][-1]["bytes"] for stage in pair) for pair in both)
    _, out = plan(capsys, *allowed, "--gb", f"{0.98 * least / 1e9:.3f}", "--device", "cpu")
    assert "what fits: training.microbatch = 1 (" in out


def test_a_plan_by_measured_times_says_what_packing_takes(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("model.sequence=16", "training.microbatch=1", 'storage.allow=["4"]')
    assert main(["plan", "demo", "--device", "cpu", "--measure", "--json", *small]) == 0
    times = json.loads(capsys.readouterr().out)["times"]
    assert times["measured"] and times["forward"] > 0
    assert [(one["kind"], one["form"]) for one in times["packing"]] == [
        ("norm_input", "4"),
        ("ffn_input", "4"),
    ]
    assert main(["plan", "demo", "--device", "cpu", *small]) == 0
    out = capsys.readouterr().out
    assert "times of a block, assumed" in out and "norm_input in 4 bits: packed in" in out
