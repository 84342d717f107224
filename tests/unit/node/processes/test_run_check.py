"""What `thinwire doctor --run-file` says of a run that fits, fits in part, or does not fit at all."""

import json
from pathlib import Path

import pytest
import torch

from node.cli.main import main
from node.processes.doctor import Check, Status
from node.processes.run_check import check_run, judge_stages
from node.run_file.loader import load_config
from node.stage.processes import choose_devices
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_bytes
from node.tuning.memory_plan import least_stage_bytes
from wire.identity.enrolment import Hardware
from wire.identity.token import JoinToken

CPU = torch.device("cpu")
SIZES = """
[model]
layers = 4
hidden = 128
heads = 4
kv_heads = 2
ffn = 256
vocab = 4096
sequence = 64
[training]
global_batch = 16
microbatch = 4
[pipeline]
stages = 4
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SIZES, encoding="utf-8")
    return path


def judged(run_file: Path, memory: int, **devices: int) -> Check:
    return judge_stages(load_config(run_file, ()), Hardware("a GPU", 8, memory, **devices))


def test_each_stage_is_compared_with_what_the_machine_offers(run_file: Path) -> None:
    """As the coordinator does: a stage that fits by computing again fits."""
    config, gpu = load_config(run_file, ()), Devices(on_cpu=False)
    kept, needs = stage_bytes(config, 4, gpu), least_stage_bytes(config, 4, gpu)
    least, most = min(needs), max(needs)
    assert least < most < max(kept)
    assert judged(run_file, max(kept)).status is Status.OK
    assert judged(run_file, max(kept)).detail.endswith("any stage fits")
    tight = judged(run_file, most)
    again = [str(stage) for stage, need in enumerate(kept) if need > most]
    assert tight.status is Status.OK and "any stage fits, stage" in tight.detail
    assert f" {', '.join(again)} if this machine stores in fewer bits, recomputes" in tight.detail
    some = judged(run_file, most - 1)
    fitting = [str(stage) for stage, need in enumerate(needs) if need < most]
    assert some.status is Status.WARN and f"only stages {', '.join(fitting)} fit" in some.detail
    none = judged(run_file, least - 1)
    assert none.status is Status.FAIL and "\n" not in none.detail
    assert none.detail.startswith("the smallest of 4 stages needs an estimated ")
    assert "more pipeline.stages" in none.fix


def test_sharing_blocks_makes_room(run_file: Path) -> None:
    """A model too large for one device fits two that share the blocks, but not two replicas."""
    config = load_config(run_file, ())
    one, replicas, shards = (
        max(least_stage_bytes(config, 4, Devices(count=count, tensor_parallel=t, on_cpu=False)))
        for count, t in ((1, 1), (2, 1), (2, 2))
    )
    assert shards < min(one, replicas)
    assert judged(run_file, shards).status is not Status.OK
    assert judged(run_file, shards, devices=2, tensor_parallel=2).status is Status.OK
    assert "on each device" in judged(run_file, shards, devices=2, tensor_parallel=2).detail


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"gpus": 4, "tensor_parallel": 4},
            "--tensor-parallel 4 does not divide this run's model.kv_heads 2",
        ),
        ({"gpus": 3}, "3 devices cannot share microbatches of 4 samples"),
    ],
)
def test_devices_that_cannot_share_the_run_are_one_line(
    run_file: Path, options: dict[str, int], line: str
) -> None:
    found = list(check_run(run_file, (CPU,) * options["gpus"], options.get("tensor_parallel", 1)))
    assert found[-1].status is Status.FAIL
    assert found[-1].detail.startswith(line) and "\n" not in found[-1].detail and found[-1].fix


def test_a_run_file_that_is_wrong_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nlayer = 3\n", encoding="utf-8")
    (check,) = check_run(path, (CPU,), 1)
    assert check.status is Status.FAIL and "layer" in check.detail and "\n" not in check.detail


def test_the_command_says_it(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    arguments = ["doctor", "--run-file", str(run_file), "--device", "cpu", "--gpus", "2", "--json"]
    assert main(arguments) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["stages"]["status"] == "ok" and "on each device" in checks["stages"]["detail"]
    assert checks["devices"]["detail"] == "cpu (2 processes), tensor parallel 1"
    assert main([*arguments[:-1], "--tensor-parallel", "2"]) == 0
    assert "cpu (2 processes), tensor parallel 2" in capsys.readouterr().out
    assert main(["doctor", "--gpus", "2", "--tensor-parallel", "3"]) == 2


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        (
            "--gpus 2",
            "--gpus 2: this machine has no GPU that torch can use: install a CUDA build of torch and a "
            "driver, leave --gpus out, or use --device cpu for 2 processes on its CPU",
        ),
        ("--gpus 100000", "--gpus must be 1 to 64, got 100000"),
        ("--device cuda:99", "--device cuda:99: this machine has 0 usable GPUs; use cpu or a lower N"),
    ],
)
def test_gpus_that_are_not_there_are_one_line(
    devices: str,
    line: str,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Several processes on a CPU are refused, except with `--device cpu`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    token = JoinToken(("127.0.0.1:1",), "demo-x", b"p" * 32, "A" * 8, b"s" * 16).encode()
    for command in (["doctor", "--run-file", str(run_file)], ["doctor"], ["join", token]):
        assert main([*command, *devices.split()]) == 2
        out, err = capsys.readouterr()
        assert out.splitlines() in ([], ["starting"])
        assert err == f"thinwire: error: {line}\n"


def test_one_device_may_be_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_devices("auto", 1) == (CPU,)
    assert choose_devices("cpu", 3) == (CPU,) * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one model")
    assert choose_devices("auto", 2) == (torch.device("cuda:0"), torch.device("cuda:1"))
