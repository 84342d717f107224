"""The command line: parsing, one-line errors, tokens, how runs begin and go on."""

import contextlib
import json
import os
import shlex
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from node.cli.main import main
from node.cli.run_directory import existing_run_directory, new_run_directory
from node.cli.run_output import emitter
from node.cli.token import parse_ttl
from node.config.schema import RunConfig
from node.coordinator.store import DATABASE_FILE, Member, Store
from node.run_file.loader import default_config, to_json
from node.telemetry.events import NodeJoined, Notice
from node.telemetry.history import HistoryWriter, read_history
from tests.support.run_events import started
from wire.errors import UserError
from wire.identity.enrolment import Hardware
from wire.identity.names import node_id_of
from wire.identity.token import JoinToken

Capture = pytest.CaptureFixture[str]
Begun = list[tuple[RunConfig, Path, bool]]
pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    config = to_json(RunConfig())
    with Store.create(directory, run_id="demo-x", config_json=config, pin=b"p" * 32, now=1.0) as store:
        store.set_addresses(["127.0.0.1:7700"])
    return directory


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """The config, the directory, and whether it is resumed, of each coordinator that a command starts."""
    found: Begun = []

    def start(config: RunConfig, *, run_dir: Path, emit: object, resume: bool, **_: bool) -> int:
        found.append((config, run_dir, resume))
        return 5

    monkeypatch.setattr("node.processes.coordinator.run_coordinator", start)
    return found


def program(*arguments: str, seconds: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "node.cli.main", *arguments], capture_output=True, text=True, timeout=seconds
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "name a command: demo, coordinator, join,"),
        ("jion tw1_x", "unknown command 'jion'; did you mean 'join'?"),
        ("zzzzzz", "unknown command 'zzzzzz'; known: demo, coordinator, join"),
        ("token crate x", "unknown command 'crate'; did you mean 'create'?"),
        ("token", "name an action: create, list, revoke (see `thinwire token --help`)"),
        ("coordinator", "arguments are required: RUN.toml (see `thinwire coordinator --help`)"),
        ("coordinator r.toml --jsno", "unknown option --jsno; did you mean '--json'?"),
        ("coordinator r.toml --run-di=x", "unknown option --run-di; did you mean '--run-dir'?"),
        ("join tok --zzz", "unknown option --zzz; known: -h, --help"),
        ("status a b", "unexpected argument 'b'"),
        ("join tok a=b", "unexpected argument 'a=b'"),
        ("demo --steps many", "argument --steps: invalid int value: 'many'"),
        ("join nonsense", "this is not a join token"),
        ("status absent", "absent is not a directory"),
        ("token list .", "contains no run"),
        ("resume .", "contains no run"),
        ("coordinator absent.toml", "absent.toml: no such run file"),
        ("config explain absent.toml", "absent.toml: no such run file"),
        ("coordinator absent.toml --resume", "--resume needs --run-dir"),
        ("demo run.step=3", "did you mean 'steps'?"),
        ("top 127.0.0..1:7702 --once", "'127.0.0..1:7702' is neither a run's directory nor its page's"),
        ("dashboard run --listen a..b:1", "'a..b:1' names no host"),
        ("sample . a --seed 9223372036854775808", "--seed must be below 2**63, got 9223372036854775808"),
        ("eval . --samples -3", "--samples must be at least 1, got -3"),
        ("plan r.toml --gb nan", "argument --gb: invalid number value: 'nan'"),
        ("plan r.toml --host-gb 1e300", "argument --host-gb: invalid number value: '1e300'"),
        ("config init --recipe demo absent/r.toml", "absent/r.toml cannot be written"),
        ("config init r.toml --days inf", "argument --days: invalid number value: 'inf'"),
        (
            "data tokenizer r.toml out --vocab 99999999999",
            "a vocabulary has 259 to 1,000,000 tokens, got 9999",
        ),
    ],
)
def test_user_mistakes_are_one_line_and_exit_code_2(line: str, words: str, capsys: Capture) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("thinwire: error: ") and err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--listen nowhere", "'nowhere' is not host:port"),
        ("--advertise a:b", "'a:b' has no port"),
        ("--device gpu", "--device must be auto, cpu, mps or cuda:N, got 'gpu'"),
        ("--listen 10.0.0..5:0", "'10.0.0..5:0' names no host"),
        (
            "--max-memory 1e300",
            "--max-memory must be a number above 0, at most 1e+09, or 0 for no limit, got 1e+300",
        ),
        (
            "--max-bandwidth 1e300",
            "--max-bandwidth must be a number above 0, at most 1e+09, or 0 for no limit",
        ),
        ("--threads=-1", "--threads must be 0 (torch's own choice) to 4096, got -1"),
        ("--threads 99999999999999", "--threads must be 0 (torch's own choice) to 4096, got 99999999999999"),
        ("--gpus 0", "--gpus must be 1 to 64, got 0"),
        ("--gpus 100000", "--gpus must be 1 to 64, got 100000"),
        ("--gpus 4 --tensor-parallel 3", "--tensor-parallel must be at least 1 and divide --gpus 4, got 3"),
        ("--gpus 2 --tensor-parallel 0", "--tensor-parallel must be at least 1 and divide --gpus 2, got 0"),
    ],
)
def test_join_options_are_checked_before_anything_starts(options: str, words: str, capsys: Capture) -> None:
    token = JoinToken(("127.0.0.1:1",), "demo-x", b"p" * 32, "A" * 8, b"s" * 16).encode()
    assert main(["join", token, *options.split()]) == 2
    assert words in capsys.readouterr().err


def test_overrides_may_stand_after_options(capsys: Capture) -> None:
    Path("run.toml").write_text("")
    assert (
        main(["config", "explain", "run.toml", "model.layers=5", "--json", "run.seed=7", "run.steps=50"]) == 0
    )
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["model"]["layers"], config["run"]["seed"], config["run"]["steps"]) == (5, 7, 50)


@pytest.mark.timeout(60)
def test_a_run_file_is_explained_with_its_held_out_text_and_its_checkpoint(capsys: Capture) -> None:
    Path("text.txt").write_text("The ferry leaves at seven. " * 99)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    config = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 2, **sizes}
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    data = '[data]\npath = "text.txt"\ntokenizer = "bytes"\n'
    for more, words in (
        ('valid = "absent.txt"\nvalid_every = 9\n[model]\nsequence = 32\n', "no file or folder absent.txt"),
        ('[model]\nfrom = "model"\nsequence = 32\n', "model has neither model.safetensors"),
    ):
        Path("run.toml").write_text(data + more)
        assert main(["config", "explain", "run.toml"]) == 2
        assert words in capsys.readouterr().err


def test_help_loads_nothing_heavy() -> None:
    watch = "import sys, node.cli.main as m; m.build_parser(); print([x for x in sys.modules if x in H])"
    heavy = {"torch", "grpc", "numpy", "rich", "cryptography", "asyncio"}
    done = subprocess.run(
        [sys.executable, "-c", f"H = {heavy!r}; {watch}"], capture_output=True, text=True, timeout=150
    )
    assert done.stdout == "[]\n"
    done = program("help")
    assert done.returncode == 0
    for command in ("coordinator", "join", "resume", "demo", "token", "status", "doctor", "config"):
        assert f"  {command}" in done.stdout


def test_output_without_room_is_one_line_and_no_bug(run_dir: Path) -> None:
    for command in (["status", str(run_dir)], ["token", "list", str(run_dir), "--json"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "node.cli.main", *command],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=150,
            )
        line = "thinwire: error: cannot write output: No space left on device\n"
        assert (done.returncode, done.stderr) == (1, line)


def test_run_directories_are_numbered(tmp_path: Path) -> None:
    assert new_run_directory(None, "demo") == Path("runs/demo-1")
    assert new_run_directory(None, "demo") == Path("runs/demo-2")
    assert new_run_directory(None, "other") == Path("runs/other-1")
    assert new_run_directory(tmp_path / "a" / "b", "demo") == tmp_path / "a" / "b"


@pytest.mark.parametrize(
    "line",
    [
        "coordinator run.toml --run-dir NAME",
        "coordinator run.toml --run-dir NAME --resume",
        "demo --run-dir NAME",
        "resume NAME",
        "status NAME",
        "coordinator run.toml data.path=NAME",
    ],
)
def test_a_name_that_is_no_text_is_one_line(line: str, capsys: Capture) -> None:
    name = os.fsdecode(b"n\xff")
    Path(name).mkdir()
    Path("run.toml").write_text("")
    assert main([word.replace("NAME", name) for word in line.split()]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "UTF-8" in told
    assert list(Path(name).iterdir()) == []


def test_a_folder_that_is_no_text_holds_no_text_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder = tmp_path / os.fsdecode(b"f\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("run.toml").write_text('[data]\npath = "text.txt"\n')
    Path("text.txt").write_text("some text")
    assert main(["coordinator", "run.toml"]) == 2
    assert "data.path" in (told := capsys.readouterr().err) and "rename that folder" in told


def test_a_run_is_never_overwritten(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"thinwire resume {run_dir}`"):
        new_run_directory(run_dir, "demo")
    assert existing_run_directory(run_dir) == run_dir
    (run_dir / DATABASE_FILE).unlink()
    with pytest.raises(UserError, match="contains no run"):
        existing_run_directory(run_dir)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run directory at .*file"):
        new_run_directory(tmp_path / "file", "demo")


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("30s", timedelta(seconds=30)),
        ("90m", timedelta(minutes=90)),
        ("1.5h", timedelta(minutes=90)),
        ("24h", timedelta(days=1)),
        ("7d", timedelta(7)),
    ],
)
def test_token_lifetimes(text: str, span: timedelta) -> None:
    assert parse_ttl(text) == span


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "0s", "367d", "999999999d", "1w", "١h"])
def test_lifetimes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--ttl"):
        parse_ttl(text)


def test_tokens_are_created_listed_and_revoked(run_dir: Path, capsys: Capture) -> None:
    def ask(*arguments: str) -> str:
        assert main(["token", *arguments]) == 0
        return capsys.readouterr().out

    assert f"`thinwire token create {run_dir}`" in ask("list", str(run_dir))
    line = ask("create", str(run_dir), "--uses", "3", "--ttl", "7d")
    assert line.startswith("thinwire join tw1_") and line.count("\n") == 1
    token = JoinToken.parse(line.split()[-1])
    assert (token.addresses, token.run_id) == (("127.0.0.1:7700",), "demo-x")

    made = json.loads(ask("create", str(run_dir), "--json"))
    assert JoinToken.parse(made["token"]).token_id == made["id"]
    listed = json.loads(ask("list", str(run_dir), "--json"))
    assert {row["id"]: row["uses_allowed"] for row in listed} == {token.token_id: 3, made["id"]: 1}
    assert listed[0]["expires"] - listed[0]["created"] in (86400, 7 * 86400)
    assert "token" not in listed[0]

    assert ask("revoke", str(run_dir), token.token_id).startswith(f"revoked {token.token_id}")
    assert json.loads(ask("revoke", str(run_dir), made["id"], "--json"))["state"] == "revoked"
    rows = [line.split() for line in ask("list", str(run_dir)).splitlines()]
    assert [row[1] for row in rows] == ["state", "revoked", "revoked"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "--uses", "0"], "--uses must be 1 to 1,000,000, got 0"),
        (["create", "--uses", "9" * 23], "--uses must be 1 to 1,000,000, got 999"),
        (["create", "--ttl", "x"], "--ttl must be"),
        (["revoke", "absent"], "no token 'absent'"),
    ],
)
def test_token_mistakes(run_dir: Path, arguments: list[str], words: str, capsys: Capture) -> None:
    assert main(["token", arguments[0], str(run_dir), *arguments[1:]]) == 2
    assert words in capsys.readouterr().err


def test_events_go_to_the_screen_and_to_the_status_file(tmp_path: Path, capsys: Capture) -> None:
    begun = started(tmp_path)
    with emitter(default_config(), json=True) as emit:
        emit(begun)
        emit(Notice(text="x"))
    assert capsys.readouterr().out == f"{begun.to_json()}\n{Notice(text='x').to_json()}\n"
    assert [entry.event for entry in read_history(tmp_path)] == [begun, Notice(text="x")]


def test_resume_hands_the_stored_config_on(run_dir: Path, begun: Begun) -> None:
    assert main(["resume", str(run_dir)]) == 5
    assert begun == [(RunConfig(), run_dir, True)]


def test_the_coordinator_command_passes_the_run_file_on(tmp_path: Path, begun: Begun) -> None:
    Path("run.toml").write_text('[run]\nname = "mine"\n')
    assert main(["coordinator", "run.toml", "run.steps=40", "data.path=text"]) == 5
    ((config, directory, resumed),) = begun
    assert (config.run.name, config.run.steps, config.data.path) == ("mine", 40, str(tmp_path / "text"))
    assert (directory, resumed) == (Path("runs/mine-1"), False)


def test_join_hands_on_a_name_on_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    token = JoinToken(("127.0.0.1:1",), "demo-x", b"p" * 32, "abcdefgh", b"s" * 16).encode()
    asked: list[str] = []
    monkeypatch.setattr("node.processes.node.run_node", lambda _, options: asked.append(options.name) or 0)
    assert main(["join", token, "--name", " Ana's\n\x1b4090 "]) == 0
    assert asked == ["Ana's 4090"]
    assert main(["join", token, "--name", "n" * 41]) == 2
    assert "at most 40" in capsys.readouterr().err


def test_a_node_is_evicted_by_its_id_or_a_name_that_only_it_has(run_dir: Path, capsys: Capture) -> None:
    assert main(["evict", str(run_dir), "nobody"]) == 2
    assert "nobody" in (said := capsys.readouterr().err) and "no members" in said
    names = {"node-a": "Ana's 4090", "node-b": "box", "node-c": "box", "node-d": "node-a", "node-e": ""}
    hardware = Hardware("cpu", 4, 10**9)
    with Store.open(run_dir) as store:
        store.restore_members(
            [Member(node, bytes([number]) * 32, hardware, 1.0) for number, node in enumerate(names)]
        )
    writer = HistoryWriter(print)
    writer(started(run_dir))
    for node, name in names.items():
        writer(NodeJoined(node_id=node, device="cpu", address="", name=name))
    writer.close()

    def evicted(node: str, code: int = 0) -> list[str]:
        assert main(["evict", str(run_dir), node]) == code
        with Store.open(run_dir) as store:
            return sorted(store.evicted())

    assert evicted("box", 2) == []
    assert "node-b or node-c" in capsys.readouterr().err
    assert evicted("nobody", 2) == []
    assert evicted("", 2) == []
    assert evicted("node-a") == ["node-a"], "an id is not taken for another's name"
    assert evicted("Ana's 4090", 2) == ["node-a"], "it is out already"
    assert evicted("node-b") == ["node-a", "node-b"]
    assert evicted("box") == ["node-a", "node-b", "node-c"]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_script_reads_who_was_evicted_and_by_which_token_it_came(
    run_dir: Path, keeps: bool, capsys: Capture
) -> None:
    with Store.open(run_dir) as store:
        record, token = store.create_token(time.time(), timedelta(hours=1), 3)
        for key in (b"k" * 32, b"l" * 32):
            member = Member(node_id_of(key), key, Hardware("cpu", 4, 10**9), time.time())
            store.admit_token(token.token_id, token.secret, member)
        members = [member.node_id for member in store.members()]
    command = ["evict", str(run_dir), members[0], "--json", *(["--keep-token"] if keeps else [])]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["node"] == members[0]
    (by,) = told["tokens"]
    assert (by["id"], by["nodes"]) == (record.token_id, sorted(members))
    assert by["uses_allowed"] == 3
    assert main(["token", "list", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told["tokens"]


def test_advice_can_be_pasted_for_folders_with_spaces(run_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    spaced = run_dir.rename(tmp_path / "my run")
    advice = shlex.quote(str(spaced))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    writer = HistoryWriter(print)
    writer(replace(started(spaced), host=socket.gethostname(), process_id=ended.pid))
    writer.close()
    assert main(["status", str(spaced)]) == 0
    assert f"thinwire resume {advice}\n" in capsys.readouterr().out
    assert main(["set", str(spaced), "data.prompts=one two"]) == 2
    assert f"`thinwire resume {advice} 'data.prompts=one two'`" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"thinwire resume {advice}`"):
        new_run_directory(spaced, "demo")
    run_file = tmp_path / "my run.toml"
    assert main(["config", "init", str(run_file), "--recipe", "demo"]) == 0
    assert f"thinwire config explain {shlex.quote(str(run_file))}\n" in capsys.readouterr().out


def test_join_reads_its_token_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = JoinToken(("127.0.0.1:1",), "demo-x", b"p" * 32, "abcdefgh", b"s" * 16).encode()
    asked: list[str] = []
    monkeypatch.setattr("node.processes.node.run_node", lambda text, _options: asked.append(text) or 0)
    wrapped = "\n".join(token[start : start + 40] for start in range(0, len(token), 40))
    for content in (token, f"thinwire join {token}\n", f"\ufeff{token}\r\n", f"thinwire join {wrapped}\n"):
        (tmp_path / "token").write_text(content, encoding="utf-8")
        assert main(["join", "--token-file", "token"]) == 0
    assert asked == [token] * 4


@pytest.mark.parametrize(
    ("arguments", "content", "words"),
    [
        ([], None, "either as TOKEN or with --token-file"),
        (["tw1_x", "--token-file", "token"], b"x", "either as TOKEN or with --token-file"),
        (["--token-file", "token"], None, "cannot be read: No such file"),
        (["--token-file", "."], None, "cannot be read: Is a directory"),
        (["--token-file", "token"], b" \n", "is empty"),
        (["--token-file", "token"], b"\xff\xfe", "it is not text"),
        (["--token-file", "token"], b"nonsense", "this is not a join token"),
    ],
)
def test_a_token_file_that_cannot_be_used(
    arguments: list[str], content: bytes | None, words: str, tmp_path: Path, capsys: Capture
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    assert main(["join", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_resume_or_start_goes_on_with_the_run_that_is_there(run_dir: Path, begun: Begun) -> None:
    changed = "coordinator.listen=127.0.0.1:0"
    # The run file is not even looked at.
    assert main(["coordinator", "absent.toml", "--resume", "--stay", "--run-dir", str(run_dir), changed]) == 5
    Path("run.toml").write_text("")
    assert main(["coordinator", "run.toml", "--resume", "--run-dir", "fresh", changed]) == 5
    assert [one[1:] for one in begun] == [(run_dir, True), (Path("fresh"), False)]
    assert {config.coordinator.listen for config, *_ in begun} == {"127.0.0.1:0"}


@pytest.mark.parametrize("resume", [["--resume"], []])
@pytest.mark.parametrize("as_far_as", ["nothing", "WAL"])
def test_a_start_that_was_killed_as_it_made_its_database_begins_again(
    as_far_as: str, resume: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run/authority").mkdir(parents=True)
    Path("run", DATABASE_FILE).touch()
    if as_far_as == "WAL":
        with contextlib.closing(sqlite3.connect(Path("run", DATABASE_FILE))) as database:
            database.execute("PRAGMA journal_mode = WAL")
    Path("run.toml").write_text("")
    begun: list[bool] = []

    def start(config: RunConfig, *, run_dir: Path, emit: object, resume: bool, **_: bool) -> int:
        begun.append(resume)
        if not resume:
            written = to_json(config)
            Store.create(run_dir, run_id="demo-x", config_json=written, pin=b"p" * 32, now=1.0).close()
        return 5

    monkeypatch.setattr("node.processes.coordinator.run_coordinator", start)
    assert main(["coordinator", "run.toml", *resume, "--run-dir", "run"]) == 5
    assert main(["coordinator", "run.toml", "--resume", "--run-dir", "run"]) == 5
    assert begun == [False, True]


@pytest.mark.parametrize("command", ["status", "top", "trace", "dashboard", "resume"])
@pytest.mark.parametrize("what", ["run/run.db", "run"])
def test_a_run_of_another_user_is_one_line(
    command: str,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.db").touch()
    # Root may read everything, so what the kernel says to others is said for it.
    refused = tmp_path / what
    real = os.access

    def access(path: Path, mode: int) -> bool:
        return refused not in (path, *path.parents) and real(path, mode)

    def exists(path: Path) -> bool:
        if what == "run" and path.parent == run:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, os.F_OK)

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(Path, "exists", exists)
    assert main([command, str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be read" in line
