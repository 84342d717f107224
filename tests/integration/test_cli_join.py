"""`thinwire join` with tokens that admit nobody, and with a coordinator that goes away."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from node.coordinator.store import Store
from node.processes.node import START_SECONDS
from node.telemetry.format import duration_text
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Process, Run, Still
from tests.support.terminal import SILENT_SECONDS
from wire.identity.token import JoinToken

CONFIG = replace(
    SMALL,
    pipeline=replace(SMALL.pipeline, stages=2),
    coordinator=replace(SMALL.coordinator, outage_seconds=2.0),
)
DAY = timedelta(days=1)

pytestmark = pytest.mark.timeout(240)


def truncated(run: Run, token: JoinToken) -> str:
    return token.encode()[:-6]


def mistyped(run: Run, token: JoinToken) -> str:
    text = token.encode()
    middle = len(text) // 2
    return text[:middle] + ("x" if text[middle] != "x" else "y") + text[middle + 1 :]


def unknown(run: Run, token: JoinToken) -> str:
    return replace(token, token_id="AAAAAAAA").encode()


def wrong_secret(run: Run, token: JoinToken) -> str:
    return replace(token, secret=bytes(16)).encode()


def revoked(run: Run, token: JoinToken) -> str:
    create = run.command("token", "create", str(run.run_dir))
    assert create.wait_exit() == 0
    (line,) = create.lines
    fresh = JoinToken.parse(line.removeprefix("thinwire join "))
    revoke = run.command("token", "revoke", str(run.run_dir), fresh.token_id)
    assert revoke.wait_exit() == 0
    return fresh.encode()


def expired(run: Run, token: JoinToken) -> str:
    with Store.open(run.run_dir) as store:
        return store.create_token(time.time() - 2 * DAY.total_seconds(), DAY, 1)[1].encode()


def used_up(run: Run, token: JoinToken) -> str:
    with Store.open(run.run_dir) as store:
        text = store.create_token(time.time(), DAY, 1)[1].encode()
    first = run.add_node(text)
    first.wait_line(lambda line: "waiting for a stage" in line)
    first.interrupt()
    assert first.wait_exit() == 130
    return text


def of_another_run(run: Run, token: JoinToken) -> str:
    return replace(token, run_id="other-abcde").encode()


def of_another_authority(run: Run, token: JoinToken) -> str:
    return replace(token, pin=bytes(32)).encode()


def to_nobody(run: Run, token: JoinToken) -> str:
    """The address of port 9, where at most a discard service listens."""
    return replace(token, addresses=("127.0.0.1:9",)).encode()


CASES: list[tuple[Callable[[Run, JoinToken], str], int, str]] = [
    (truncated, 2, "cut short"),
    (mistyped, 2, "mistyped"),
    (unknown, 1, "never issued"),
    (wrong_secret, 1, "never issued"),
    (revoked, 1, "revoked"),
    (expired, 1, "expired"),
    (used_up, 1, "ask for a new one"),
    (of_another_run, 2, "serves run small-"),
    (of_another_authority, 2, "key"),
    (to_nobody, 1, "127.0.0.1:9"),
]


def test_tokens_that_admit_nobody(prefork: Prefork, tmp_path: Path) -> None:
    """Each gets one line and leaves no trace in the run; the next valid token still joins."""
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        coordinator = run.start()
        token = JoinToken.parse(coordinator.token)
        refused: list[tuple[str, Process, int, str]] = []
        for make, code, words in CASES:
            refused.append((make.__name__, run.add_node(make(run, token)), code, words))
        for name, node, code, words in refused:
            assert node.wait_exit() == code, f"{name}\n{node.report()}"
            assert not any("joined" in line for line in node.lines), name
            (line,) = node.stderr.splitlines()
            assert line.startswith("thinwire: error: "), name
            assert words in line, f"{name}: {line}"
        with Store.open(run.run_dir) as store:
            members = [member.node_id for member in store.members()]
            uses = {record.token_id: record.uses for record in store.list_tokens()}
        good = [number for number, node in enumerate(run.nodes) if node.exit_code == 130]
        assert members == [run.node_id(number) for number in good]
        assert uses[token.token_id] == 0

        run.add_nodes(2)
        run.assert_undisturbed()
        assert coordinator.exit_code == 0


def test_a_coordinator_that_goes_away(prefork: Prefork, tmp_path: Path) -> None:
    """Nodes that wait give up after `outage_seconds`, with a line that names the address, or leave at once if
    they are asked to. Before that, one that opens no port is refused, as the run has no relay."""
    config = replace(CONFIG, pipeline=replace(CONFIG.pipeline, stages=3))
    config = replace(config, coordinator=replace(config.coordinator, relay=False))
    with Run(tmp_path, config, launch=prefork.popen) as run:
        coordinator = run.start()
        closed = run.add_node(options=("--no-listen",))
        assert closed.wait_exit() == 1
        assert "neighbours cannot reach this node" in closed.complaints[-1]
        waiting, patient = run.add_node(), run.add_node(options=("--wait", "10 min"))
        for node in (waiting, patient):
            node.wait_line(lambda line: "waiting for a stage" in line)
        began = time.monotonic()
        coordinator.kill()
        patient.interrupt()
        assert patient.wait_exit(SILENT_SECONDS) == 130, "it does not wait two minutes for a goodbye"
        assert waiting.wait_exit() == 1
        assert time.monotonic() - began > CONFIG.coordinator.outage_seconds / 2
        (complaint,) = waiting.complaints
        assert "coordinator at 127.0.0.1:" in complaint
        assert " for 2 s: " in complaint
        # As a member it does not wait for it either.
        again = run.add_node(state_dir=run.state_dir(1))
        assert again.wait_exit() == 1
        (complaint,) = again.complaints
        assert f" did not answer for {duration_text(START_SECONDS)}: " in complaint
        run.assert_quiet()


def test_a_coordinator_that_goes_away_in_the_middle_of_a_step(prefork: Prefork, tmp_path: Path) -> None:
    """Working nodes do the same, and a resumed run begins at the coordinator's last recorded step."""
    config = replace(CONFIG, run=replace(CONFIG.run, snapshot_every=3))
    with Run(tmp_path, config, launch=prefork.popen, still=Still(stage=0, steps=5)) as run:
        first = run.start()
        nodes = run.add_nodes(2)
        still = run.wait_still()
        first.kill()
        still.go_on()
        assert [node.wait_exit() for node in nodes] == [1, 1]
        for node in nodes:
            (complaint,) = node.complaints
            assert "coordinator at 127.0.0.1:" in complaint
        second = run.resume("coordinator.regroup_seconds=0.5")
        run.add_nodes(2)
        assert second.wait_exit() == 0
        run.assert_undisturbed()
