"""The doctor's findings, each with what to do about it."""

import contextlib
import json
import os
import resource
import socket
import ssl
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from kernels.common.devices import of_capability
from node.cli.main import main
from node.processes import doctor
from node.processes.doctor import (
    MIN_FREE_BYTES,
    MIN_OPEN_FILES,
    MIN_WRITE_RATE,
    Check,
    Status,
    check_congestion_control,
    check_disk,
    check_event_loop,
    check_open_files,
    check_python,
    check_slow_start,
    check_token,
    examine,
    healthy,
    judge_disk,
    judge_gpu,
    judge_torch,
)
from node.processes.reach_check import judge_precision
from node.stage import machine_info
from tests.support.homes import without_home
from tests.support.ports import free_port
from wire.descriptors import NEEDED
from wire.errors import LinkError, TokenError
from wire.identity.authority import CertificateAuthority
from wire.identity.token import JoinToken

TOKEN = JoinToken(("127.0.0.1:1", "127.0.0.1:2"), "demo-x", b"p" * 32, "A" * 8, b"s" * 16)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_every_failed_check_says_what_to_do(tmp_path: Path) -> None:
    checks = examine(token="tw1_truncated", state_dir=tmp_path)
    assert {"python", "torch", "memory", "open files", "disk", "token"} <= {c.name for c in checks}
    for check in checks:
        assert bool(check.fix) == (check.status is not Status.OK), check
        assert "\n" not in check.detail + check.fix


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10, 13), Status.FAIL), ((3, 11, 0), Status.OK), ((3, 13, 2), Status.OK), ((3, 14, 0), Status.FAIL)],
)
def test_python_versions(version: tuple[int, ...], status: Status) -> None:
    assert check_python(version).status is status


def test_the_event_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_event_loop().status is Status.OK and check_event_loop().detail.startswith("uvloop ")
    monkeypatch.setattr("wire.event_loop.uvloop", None)
    without = check_event_loop()
    assert without.status is Status.WARN and "asyncio" in without.detail and "uvloop" in without.fix


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.10.1", Status.FAIL),
        ("2.11.0", Status.OK),
        ("2.13.0+cpu", Status.OK),
        ("2.14.0a0+git123", Status.OK),
        ("3.0.0", Status.OK),
    ],
)
def test_torch_versions(version: str, status: Status) -> None:
    assert judge_torch(version).status is status


@pytest.mark.parametrize(
    ("limits", "status", "fix"),
    [
        ((64, NEEDED), Status.OK, ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Status.OK, ""),
        ((64, resource.RLIM_INFINITY), Status.OK, ""),
        ((MIN_OPEN_FILES, NEEDED - 1), Status.WARN, f"hard limit to {NEEDED}"),
        ((64, MIN_OPEN_FILES - 1), Status.FAIL, "administrator"),
    ],
)
def test_open_files(limits: tuple[int, int], status: Status, fix: str) -> None:
    check = check_open_files(limits)
    assert check.status is status
    assert fix in check.fix


@pytest.mark.parametrize(
    ("content", "status"), [("cubic\n", Status.OK), ("bbr\n", Status.WARN), ("bbr2\n", Status.WARN)]
)
def test_congestion_control_that_shares_a_line_badly_is_named(
    content: str, status: Status, tmp_path: Path
) -> None:
    setting = tmp_path / "tcp_congestion_control"
    setting.write_text(content)
    (check,) = check_congestion_control(setting)
    assert check.status is status and content.strip() in check.detail
    assert ("cubic" in check.fix) == (status is Status.WARN)


@pytest.mark.parametrize(("content", "helps"), [("1\n", True), ("0\n", False)])
def test_slow_start_after_idle_is_reported_without_a_warning(
    content: str, helps: bool, tmp_path: Path
) -> None:
    setting = tmp_path / "tcp_slow_start_after_idle"
    setting.write_text(content)
    (check,) = check_slow_start(setting)
    assert check.status is Status.OK
    assert ("sysctl -w net.ipv4.tcp_slow_start_after_idle=0" in check.detail) is helps
    assert list(check_slow_start(tmp_path / "absent")) == []


def test_an_unknown_congestion_control_is_not_queried_further(tmp_path: Path) -> None:
    assert list(check_congestion_control(tmp_path / "absent")) == []


def test_a_state_directory_behind_a_folder_that_may_not_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other checks are reported all the same."""

    def exists(path: Path) -> bool:
        if tmp_path in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return path.is_dir()

    monkeypatch.setattr(Path, "exists", exists)
    assert main(["doctor", "--state-dir", str(tmp_path / "locked" / "node")]) == 1
    said = capsys.readouterr().out
    assert (
        f"fail  state directory: {tmp_path / 'locked' / 'node'} cannot be written: Permission denied" in said
    )
    assert "ok    python: " in said


def test_a_user_without_a_home_has_no_default_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    (check,) = (check for check in examine() if check.name == "state directory")
    assert check.status is Status.FAIL and check.fix == "set HOME, or give --state-dir"


def test_disk_space_and_speed_are_judged() -> None:
    assert judge_disk(MIN_FREE_BYTES, MIN_WRITE_RATE).status is Status.OK
    tight = judge_disk(MIN_FREE_BYTES - 1, MIN_WRITE_RATE)
    assert (tight.status, tight.fix) == (Status.WARN, "free 2 GB")
    slow = judge_disk(MIN_FREE_BYTES, MIN_WRITE_RATE / 2)
    assert slow.status is Status.WARN and "faster disk" in slow.fix


def test_a_state_directory_that_does_not_exist_yet_is_fine(tmp_path: Path) -> None:
    checks = list(check_disk(tmp_path / "a" / "b"))
    assert checks[0] == Check(
        name="state directory", status=Status.OK, detail=f"{tmp_path / 'a' / 'b'} can be written"
    )
    assert checks[1].name == "disk"
    assert list(tmp_path.iterdir()) == []


def test_a_state_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    (check,) = check_disk(blocked / "state")
    assert check.status is Status.FAIL
    assert "cannot be written" in check.detail and "--state-dir" in check.fix

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (check,) = check_disk(tmp_path)
    assert check.status is Status.FAIL
    assert "No space left on device" in check.detail


@pytest.mark.parametrize(
    "text", ["", "tw1_", "tw2_abc", TOKEN.encode()[:-4], TOKEN.encode().replace("tw1", "xx1")]
)
def test_a_token_that_cannot_be_read(text: str) -> None:
    (check,) = check_token(text)
    assert check.status is Status.FAIL
    assert "join line" in check.fix


def stub_contact(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Exception | None]) -> None:
    async def fetch_authority(address: str, pin: bytes, seconds: float) -> bytes:
        error = answers[address]
        if error is not None:
            raise error
        return b"pem"

    monkeypatch.setattr("wire.bootstrap.fetch_authority", fetch_authority)


@pytest.mark.parametrize(
    ("second", "statuses"),
    [
        (None, [Status.OK, Status.OK, Status.OK]),
        (LinkError("nothing answers"), [Status.OK, Status.OK, Status.WARN]),
    ],
)
def test_one_address_that_answers_is_enough(
    monkeypatch: pytest.MonkeyPatch, second: Exception | None, statuses: list[Status]
) -> None:
    stub_contact(monkeypatch, {"127.0.0.1:1": None, "127.0.0.1:2": second})
    assert [check.status for check in check_token(TOKEN.encode())] == statuses


def test_a_coordinator_that_is_not_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_contact(monkeypatch, {"127.0.0.1:1": TokenError("other key"), "127.0.0.1:2": LinkError("silence")})
    token, first, second = check_token(TOKEN.encode())
    assert token.status is Status.OK
    assert first.status is Status.FAIL and "do not join" in first.fix
    assert second.status is Status.FAIL and "port is open" in second.fix
    assert not healthy([token, first, second])


def test_a_port_where_nothing_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    token = JoinToken((address,), "demo-x", b"p" * 32, "A" * 8, b"s" * 16)
    (_, contact) = check_token(token.encode())
    assert contact.status is Status.FAIL
    assert address in contact.detail


@pytest.mark.parametrize(("found", "code"), [(Status.OK, 0), (Status.WARN, 0), (Status.FAIL, 1)])
def test_the_command(
    found: Status, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Check(name="x", status=found, detail="y", fix="z")
    monkeypatch.setattr(doctor, "examine", lambda token, state_dir: [check])
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


@pytest.mark.parametrize(
    ("arguments", "name"), [(["foo"], "token"), (["--run-file", "nofile", "--device", "cpu"], "run file")]
)
def test_unusable_input_has_its_own_exit_code(
    arguments: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--state-dir", str(tmp_path), *arguments]) == 2
    checks = {check["name"]: check["status"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks[name] == "fail"


def test_a_real_certificate_is_compared_with_the_pin(tmp_path: Path) -> None:
    authority = CertificateAuthority.create("demo-x", time.time())
    key, certificate = authority.coordinator_credentials(timedelta(hours=1), time.time())
    (tmp_path / "chain.pem").write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain.pem")
    context.set_alpn_protocols(["h2"])

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is closed under us if the test fails
            for _ in range(2):
                connection, _ = listener.accept()
                with (
                    connection,
                    contextlib.suppress(OSError),
                    context.wrap_socket(connection, server_side=True) as tls,
                ):
                    tls.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for pin, status in ((authority.pin, Status.OK), (b"x" * 32, Status.FAIL)):
            token = JoinToken((address,), "demo-x", pin, "A" * 8, b"s" * 16)
            assert [check.status for check in check_token(token.encode())] == [Status.OK, status]
        thread.join(30)


def test_a_token_says_what_the_device_must_compute_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_info, "kind_of", lambda device: of_capability(7, 5))
    device = torch.device("cpu")
    (bad,) = judge_precision("bfloat16", "precision", device)
    assert bad.status is Status.FAIL and "computes in bfloat16" in bad.detail and "auto" in bad.fix
    (bad,) = judge_precision("bfloat16", "fp8", device)
    assert bad.status is Status.FAIL and "8.9" in bad.fix
    for precision in ("float16", "float32", "auto"):
        (good,) = judge_precision(precision, "precision", device)
        assert good.status is Status.OK
    for precision, compute in (("", ""), ("float99", "precision"), ("float32", "\x1b[31m" * 999)):
        (bad,) = judge_precision(precision, compute, device)
        assert bad.status is Status.FAIL and len(bad.detail) <= 200 and bad.detail.isprintable()


def test_a_card_without_bfloat16_is_told_which_runs_it_computes() -> None:
    old = judge_gpu(0, "Tesla T4", 15 << 30, 16 << 30, of_capability(7, 5))
    assert old.status is Status.WARN and "no bfloat16" in old.detail
    assert 'training.precision = "float16"' in old.fix and "close other programs" not in old.fix
    crowded = judge_gpu(1, "Tesla T4", 1 << 30, 16 << 30, of_capability(7, 5))
    assert "close other programs" in crowded.fix and "float16" in crowded.fix
    new = judge_gpu(0, "NVIDIA A100", 39 << 30, 40 << 30, of_capability(8, 0))
    assert new.status is Status.OK and new.fix == ""
