"""What `thinwire doctor --run-file` says of a run that fits, fits in part, or does not fit at all."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.cli.main import main
from node.processes.doctor import Check, Status, healthy
from node.processes.reach_check import Findings, Seen, check_reach, judged, nat_words
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


def judged_stages(run_file: Path, memory: int, **devices: int) -> Check:
    return judge_stages(load_config(run_file, ()), Hardware("a GPU", 8, memory, **devices))


def test_each_stage_is_compared_with_what_the_machine_offers(run_file: Path) -> None:
    """As the coordinator does: a stage that fits by computing again fits."""
    config, gpu = load_config(run_file, ()), Devices(on_cpu=False)
    kept, needs = stage_bytes(config, 4, gpu), least_stage_bytes(config, 4, gpu)
    least, most = min(needs), max(needs)
    assert least < most < max(kept)
    assert judged_stages(run_file, max(kept)).status is Status.OK
    assert judged_stages(run_file, max(kept)).detail.endswith("any stage fits")
    tight = judged_stages(run_file, most)
    again = [str(stage) for stage, need in enumerate(kept) if need > most]
    assert tight.status is Status.OK and "any stage fits, stage" in tight.detail
    assert f" {', '.join(again)} if this machine stores in fewer bits, recomputes" in tight.detail
    some = judged_stages(run_file, most - 1)
    fitting = [str(stage) for stage, need in enumerate(needs) if need < most]
    assert some.status is Status.WARN and f"only stages {', '.join(fitting)} fit" in some.detail
    none = judged_stages(run_file, least - 1)
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
    assert judged_stages(run_file, shards).status is not Status.OK
    assert judged_stages(run_file, shards, devices=2, tensor_parallel=2).status is Status.OK
    assert "on each device" in judged_stages(run_file, shards, devices=2, tensor_parallel=2).detail


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


# ---- `node.processes.reach_check`: what it says of a NAT, of paths and of the line


HOME, OUTSIDE = "192.168.1.7", "203.0.113.9"


def through(*ports: int, there: str = OUTSIDE, here: tuple[str, int] = (HOME, 40000)) -> tuple[Seen, ...]:
    """Connections to as many targets, as those see their ports."""
    return tuple(
        Seen(target=f"198.51.100.{number}:443", here=here, there=(there, port))
        for number, port in enumerate(ports)
    )


FOUND = Findings(
    host=OUTSIDE,
    seen=through(40000, 40000),
    not_mapped="NAT-PMP: the gateway does not answer",
    relayed=True,
    near=(("198.51.100.4:7710", 0.012), ("198.51.100.5:7710", 0.030)),
    round_trip=0.02,
    down=5e6,
    up=1e6,
)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (through(40000, 40000), f"NAT at {OUTSIDE} that maps a port in the same way for every target (2"),
        (through(1025, 1025), f"NAT at {OUTSIDE} that maps a port in the same way for every target (2"),
        (through(1025, 1026), f"NAT at {OUTSIDE} with another port for each target (symmetric)"),
        (through(40000), f"NAT at {OUTSIDE}; it keeps ports"),
        (through(1025), f"NAT at {OUTSIDE} that changes ports; only one target could be asked"),
        (through(40000, there=HOME), f"none: others see this machine's own address {HOME}"),
        ((), f"others see {OUTSIDE}; nobody could be asked"),
    ],
)
def test_the_kind_of_nat_in_words(seen: tuple[Seen, ...], words: str) -> None:
    assert nat_words(replace(FOUND, seen=seen)).startswith(words)


def said(found: Findings) -> dict[str, str]:
    return {check.name: check.detail for check in judged(found)}


def test_each_path_has_a_line() -> None:
    assert healthy(list(judged(FOUND)))
    assert list(said(FOUND)) == ["nat", "direct path", "simultaneous open", "relay", "line"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reached": True}, "others can dial this machine"),
        (
            {"mapped_port": 7001, "mapped_by": "UPnP", "mapped_reached": True},
            "others can dial this machine at port 7001 of its router (UPnP)",
        ),
        (
            {"mapped_port": 7001, "mapped_by": "UPnP"},
            "promised its port 7001 (UPnP), but it does not lead here",
        ),
        ({"not_mapped": ""}, "none of its ports answers the coordinator"),
    ],
)
def test_the_direct_path_in_words(changes: dict[str, object], words: str) -> None:
    assert said(replace(FOUND, **changes))["direct path"].endswith(words)  # type: ignore[arg-type]


def test_a_symmetric_nat_and_a_proxy_rule_out_simultaneous_open() -> None:
    assert "does not work" in said(replace(FOUND, seen=through(1, 2)))["simultaneous open"]
    behind_proxy = said(replace(FOUND, proxy="192.168.1.1:3128", seen=()))
    assert behind_proxy["simultaneous open"] == "not through a proxy"
    assert behind_proxy["nat"].startswith("everything goes through the proxy 192.168.1.1:3128")


def test_without_any_relay_a_machine_that_cannot_be_dialled_fails() -> None:
    alone = replace(FOUND, relayed=False, near=())
    (relay,) = (check for check in judged(alone) if check.name == "relay")
    assert relay.status is Status.FAIL and "coordinator.relay" in relay.fix
    assert healthy(list(judged(replace(alone, reached=True))))


def test_a_slow_line_and_a_token_that_is_used_up_are_said() -> None:
    slow = {check.name: check for check in judged(replace(FOUND, up=1e5, refusal="it is used up"))}
    assert slow["line"].status is Status.WARN and "0.8 Mbit/s up" in slow["line"].detail
    assert slow["token"].status is Status.FAIL and slow["token"].detail == "it is used up"


def test_a_token_that_cannot_be_read_is_left_to_its_own_check() -> None:
    assert list(check_reach("tw1_truncated", torch.device("cpu"))) == []
