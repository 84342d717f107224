"""`thinwire top`: its lines, the sources of its views, and its output without any."""

import asyncio
import contextlib
import itertools
import json
import math
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from node.cli import top
from node.cli.main import main
from node.config.schema import RunConfig
from node.dashboard.feed import Feed
from node.dashboard.pages import page_tls
from node.dashboard.server import Page, serve_page
from node.display import watch
from node.display.status import COORDINATOR_GONE
from node.display.top import path_sentences, sparkline, view_lines
from node.display.watch import HistoryWatch, PageWatch
from node.telemetry import events
from node.telemetry.history import HISTORY_FILE, HistoryWriter
from node.view.run_view import RunView
from node.view.view_builder import RunViewBuilder, view
from tests.support.run_events import (
    BEGAN,
    NODES,
    aborted,
    history,
    joined,
    link_cost,
    opening,
    placed,
    started,
    step,
)
from wire.errors import LinkError, ProtocolViolationError, RunError, UserError
from wire.identity.authority import CertificateAuthority

STORED = events.SnapshotStored(step=2, bytes=1000, path="p")


def write(directory: Path, *told: events.Event) -> None:
    writer = HistoryWriter(print)
    writer(started(directory))
    for event in told:
        writer(event)
    writer.close()


def test_everything_is_on_the_screen() -> None:
    seen = view(history(opening(), step(1), step(2), STORED, aborted(3)))
    text = "\n".join(view_lines(seen, now=seen.updated + 90))
    for words in (
        "run demo (demo-abc): restoring, step 2/100",
        "loss 5.9800",
        "4.1k tokens/s",
        "activations fixed-6, gradients fixed-8",
        "bottleneck",
        "node-aaaa",
        "0 to 1",
        "6.26",
        "25%",
        "3 nodes, 1 spare;  snapshot of step 2, 1m31s old;  1 aborted",
        "step 3 aborted and runs again",
    ):
        assert words in text, words
    assert "192.0.2" not in text


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("name", ["", "the machine in the attic of Ana's house"])
def test_a_narrow_terminal_keeps_who_waits_for_whom(width: int, name: str) -> None:
    nodes = [replace(joined(node), name=name) for node in ("node-aaaaaaaaaa", "node-bbbbbbbbbb")]
    told = [started(), *nodes, placed(nodes=[node.node_id for node in nodes])]
    seen = view(history(told, step(1), step(2)))
    lines = view_lines(seen, BEGAN, width)
    stages = next(number for number, line in enumerate(lines) if line.split()[:1] == ["stage"])
    links = next(number for number, line in enumerate(lines) if line.split()[:1] == ["link"])
    assert max(map(len, lines[stages : stages + 3])) <= width
    assert max(map(len, lines[links : links + 3])) <= width
    for title in ("busy", "wait up", "wait down", "wait votes", "wait coord"):
        assert title in lines[stages]
    assert lines[stages + 2].lstrip().startswith("1")
    assert "use" in lines[links] and "capacity" in lines[links]
    assert ("gpu" in lines[stages]) is (width == 140 and not name)


def test_links_report_what_is_known() -> None:
    """A million bytes a second each; the last one's capacity was measured with too little to tell it."""
    capacities = [1.1e6, 2e6, 0.0, 9e6]
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1)]
    links = tuple(link_cost(*pair, capacity=c) for pair, c in zip(pairs, capacities, strict=True))
    cost = events.StepCosts(**{**vars(step(1)[0]), "links": links})
    lines = [line.strip() for line in view_lines(view(history(opening(), cost, step(1)[1])), BEGAN)]
    rows = {line[:6]: line.split()[4:] for line in lines if re.match(r"\d to \d ", line)}
    assert [rows[f"{a} to {b}"][:3] for a, b in pairs] == [
        ["8.0", "8.8", "91%"],
        ["8.0", "16.0", "50%"],
        ["8.0", "-", "-"],
        ["8.0", "-", "little"],
    ]
    assert rows["0 to 1"][3] == "full" and "full" not in rows["1 to 0"]


def test_links_say_which_path_they_take_and_why() -> None:
    ways = {(0, 1): "direct", (1, 0): "direct", (1, 2): "relay", (2, 1): "relay"}
    links = tuple(replace(link_cost(*way), path=path) for way, path in ways.items())
    why = "the node of stage 1 does not answer its neighbour and the node of stage 2 opens no port"
    three = [started(), *map(joined, NODES[:2]), joined(NODES[2], "", listens=False), placed(nodes=NODES)]
    seen = view(history(three, replace(step(1)[0], links=links), step(1)[1]))
    lines = [line.strip() for line in view_lines(seen, BEGAN)]
    assert f"path        1 and 2: relay (coordinator), because {why}" in lines
    assert [
        sum(line.endswith(f"  {path}") for line in lines) for path in ("direct", "relay (coordinator)")
    ] == [2, 2]
    assert path_sentences(seen) == [
        "0 and 1 (16.0 Mbit/s): direct",
        f"1 and 2 (16.0 Mbit/s): relay (coordinator), because {why}",
    ]
    direct = replace(seen, links=seen.links[:2])
    assert path_sentences(direct) == ["0 and 1 (16.0 Mbit/s): direct"]
    assert path_sentences(direct, relayed_only=True) == path_sentences(replace(seen, links=())) == []


def test_nothing_from_a_node_reaches_the_terminal_as_it_is() -> None:
    hostile = "\x1b[2Jowned\x07"
    seen = view(
        history(
            started(),
            events.NodeJoined(node_id=hostile, device=hostile, address="", name=hostile),
            events.Notice(text=hostile),
        )
    )
    text = "\n".join(view_lines(seen, BEGAN))
    assert "owned" in text and "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ((0.0, 1.0), 4, "▁█"),
        ((2.0, 2.0, 2.0), 4, "▁▁▁"),
        ((0.0, 0.0, 7.0, 7.0), 2, "▁█"),
        ((1.0, math.nan, 8.0), 4, "▁ █"),
        ((), 4, ""),
    ],
)
def test_sparklines(values: tuple[float, ...], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


def test_a_view_survives_its_json() -> None:
    seen = view(history(opening(), step(1), STORED, aborted(2)))
    assert RunView.from_json(seen.to_json()) == seen
    for text in ("nonsense", "[]", "{}", '{"run_id": 3}'):
        with pytest.raises(ProtocolViolationError):
            RunView.from_json(text)


def test_a_history_of_any_length_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.telemetry.history.MOST_BYTES", 1 << 16)
    with (tmp_path / HISTORY_FILE).open("w") as file:
        file.write(("{" + "x" * 998 + "\n") * 10_000)
    tracemalloc.start()
    try:
        HistoryWatch(tmp_path).view()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3e6, "of a file of ten million bytes"


LOOK_UPS = ("127.0.0..1:7702", f"http://{'a' * 64}:7702/")
"""What no look-up takes."""


@pytest.mark.parametrize(
    "address", ["nowhere", "ftp://127.0.0.1:1", "http://", "127.0.0.1:port", "[::1", *LOOK_UPS]
)
def test_what_is_neither_a_directory_nor_an_address(address: str) -> None:
    with pytest.raises(UserError, match="neither a run's directory"):
        PageWatch(address)


async def test_views_come_from_a_coordinators_page() -> None:
    feed = Feed(RunViewBuilder())
    async with serve_page(Page(feed=feed), "127.0.0.1", 0) as port:
        watch = PageWatch(f"127.0.0.1:{port}")
        for event in (*opening(), *step(1)):
            feed.apply(event, BEGAN)
        feed.close()
        assert await asyncio.to_thread(watch.view) == await feed.view()
        assert (await feed.view()).step == 1


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (web.Response(status=404), "answers 404: this is not a run's page"),
        (web.Response(text='{"another": "version"}'), "another thinwire version"),
        (web.Response(text='{"now": 1, "view": {"another": "version"}}'), "another thinwire version"),
        (web.Response(text="[]"), "another thinwire version"),
        (web.Response(text="<html>"), "another thinwire version"),
    ],
)
async def test_a_server_that_is_not_a_runs_page(answer: web.Response, complaint: str) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return answer

    async with answering(handler) as address:
        with pytest.raises(RunError, match=complaint):
            await asyncio.to_thread(PageWatch(address).view)


@pytest.mark.parametrize(
    "begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n"]
)
async def test_an_answer_that_never_ends_is_given_up(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MOST_SECONDS", 0.2)
    over, closed = asyncio.Event(), asyncio.Event()

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while not over.is_set():
            writer.write(b"X")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.01)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        closed.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(LinkError, match="timed out"):
            await asyncio.to_thread(PageWatch(f"127.0.0.1:{port}").view)
        over.set()
        await closed.wait()


@contextlib.asynccontextmanager
async def answering(handler: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """The address of a server whose `/api/view` answers so."""
    application = web.Application()
    application.router.add_get("/api/view", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


MAY_MISS = ("loss", "eta_seconds", "snapshot", "bottleneck", "token_uses", "ended")


def of_another_version(seen: RunView) -> dict[str, Any]:
    """A view's fields with more of them on every level, and without those that may be missing."""
    fields: dict[str, Any] = json.loads(seen.to_json())
    for part in (
        fields,
        fields["loss_curve"],
        *fields["stages"],
        *fields["links"],
        *fields["links"][0]["flows"],
        *fields["members"],
        *fields["events"],
    ):
        part["of_a_later_version"] = {"any": ["thing", None]}
    fields["stages"][0]["shares"] = {"thinking": 1.0}
    for name in MAY_MISS:
        del fields[name]
    for stage in fields["stages"]:
        del stage["gpu_memory_bytes"], stage["blocks"]
    for link in fields["links"]:
        del link["use"], link["full"]
    return fields


async def test_a_page_of_another_version_is_shown_as_far_as_it_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = view(history(opening(), step(1), STORED, aborted(2)))
    fields = of_another_version(seen)

    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"now": BEGAN, "view": fields, "of_a_later_version": 1})

    async with answering(handler) as address:
        read = await asyncio.to_thread(PageWatch(address).view)
        unknown = (read.loss, read.eta_seconds, read.snapshot, read.bottleneck, read.token_uses, read.ended)
        assert unknown == (None, None, None, (), None, "")
        assert {link.use for link in read.links} == {None} and read.stages[1].blocks == 0
        known = {"run_id", "state", "step", "steps", "loss_curve", "members", "events", "aborted"}
        assert {name: getattr(read, name) for name in known} == {name: getattr(seen, name) for name in known}
        assert await asyncio.to_thread(main, ["top", address, "--once"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "run demo (demo-abc): restoring, step 1/100"
        rows = [line.split() for line in lines]
        assert ["0", "node-aaaa", "80%", *"----------", "300", "MB", "-"] in rows
        del fields["steps"], fields["state"]
        with pytest.raises(RunError, match=r"no state, steps"):
            await asyncio.to_thread(PageWatch(address).view)


def test_a_run_whose_coordinator_died_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    waiting = HistoryWatch(tmp_path).view()
    assert waiting.state == "waiting for nodes" and "paste the join line" in waiting.bottleneck[0]
    assert f"`thinwire token create {tmp_path}`" in waiting.bottleneck[0]
    monkeypatch.setattr("node.display.status.coordinator_alive", lambda *_: False)
    gone = HistoryWatch(tmp_path).view()
    assert (gone.state, gone.ended, gone.bottleneck) == ("stopped", COORDINATOR_GONE, ())


def test_sentences_are_wrapped_to_the_terminal() -> None:
    seen = view(history(opening(), step(1)))
    sentence = "stage 1 is the slowest: " + ", ".join(f"for the reason {n}" for n in range(12))
    whole = view_lines(replace(seen, bottleneck=(sentence,)), now=seen.updated)
    assert f"bottleneck  {sentence}" in whole
    lines = view_lines(replace(seen, bottleneck=(sentence,)), now=seen.updated, width=60)
    first = next(i for i, line in enumerate(lines) if line.startswith("bottleneck  "))
    wrapped = [lines[first], *itertools.takewhile(lambda x: x.startswith(" " * 12), lines[first + 1 :])]
    assert len(wrapped) > 3 and max(map(len, wrapped)) <= 60
    assert " ".join(line[12:] for line in wrapped) == sentence


def test_the_command_shows_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.db").touch()
    write(tmp_path, *opening()[1:], *step(1), events.RunFinished(reason="enough", failed=True))
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "failed (enough), step 1/100" in capsys.readouterr().out
    assert main(["top", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "failed"
    assert main(["top", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("run demo (demo-abc): failed (enough), step 1/100; loss 5.9900")


@pytest.mark.parametrize("where", ["/no/such/run", "127.0.0.1:1"])
def test_the_command_says_what_is_wrong_in_one_line(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", where, "--once"]) in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.fixture
async def page_under_tls(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a page as `dashboard.tls` serves it; its CA is `tmp_path`/ca.pem."""
    authority = CertificateAuthority.create("demo-abc", time.time())
    (tmp_path / "ca.pem").write_bytes(authority.certificate_pem)
    tls = page_tls(RunConfig(), "127.0.0.1", authority, tmp_path)
    feed = Feed(RunViewBuilder())
    for event in (*opening(), *step(1)):
        feed.apply(event, BEGAN)
    async with serve_page(Page(feed=feed), "127.0.0.1", 0, tls) as port:
        yield f"https://127.0.0.1:{port}"


async def test_a_page_under_the_runs_own_ca(page_under_tls: str, tmp_path: Path) -> None:
    trusting = PageWatch(page_under_tls, tmp_path / "ca.pem")
    assert (await asyncio.to_thread(trusting.view)).step == 1
    with pytest.raises(RunError, match=r"cannot be trusted .*--ca the run.s authority/ca\.pem"):
        await asyncio.to_thread(PageWatch(page_under_tls).view)


async def test_with_a_ca_and_no_scheme_the_page_is_asked_over_tls(
    page_under_tls: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = page_under_tls.removeprefix("https://")
    authority = tmp_path / "ca.pem"
    assert (await asyncio.to_thread(PageWatch(place, authority).view)).step == 1
    # As it was printed, with a slash at its end.
    asked = ["top", f"{place}/", "--once", "--json", "--ca", str(authority)]
    assert await asyncio.to_thread(main, asked) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    with pytest.raises(
        LinkError, match=r"^http://.* does not answer .* page with dashboard\.tls is at https://"
    ):
        await asyncio.to_thread(PageWatch(place).view)


async def test_a_page_without_tls_asked_over_it(page_under_tls: str, tmp_path: Path) -> None:
    async with serve_page(Page(feed=Feed(RunViewBuilder())), "127.0.0.1", 0) as port:
        with pytest.raises(LinkError, match=r"^https://.* without dashboard\.tls is at http://"):
            await asyncio.to_thread(PageWatch(f"127.0.0.1:{port}", tmp_path / "ca.pem").view)


def test_bytes_that_are_not_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "ca.pem"
    for reason in ("No such file or directory", "it contains no certificate"):
        assert main(["top", "https://127.0.0.1:1", "--once", "--ca", str(wrong)]) == 2
        complaint = capsys.readouterr().err
        assert reason in complaint and len(complaint.splitlines()) == 1
        wrong.write_text("no certificate")


def test_an_outage_of_the_page_is_waited_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[RunView | LinkError] = [
        view(history(opening(), step(1))),
        LinkError("it does not answer"),
        LinkError("it does not answer"),
        view(history(opening(), step(1), [events.RunFinished(reason="enough", failed=False)])),
    ]

    class Restarting:
        def view(self) -> RunView:
            answer = answers.pop(0)
            if isinstance(answer, LinkError):
                raise answer
            return answer

    monkeypatch.setattr(top, "_open", lambda *_: Restarting())
    monkeypatch.setattr(top, "INTERVAL_SECONDS", 0.0)
    assert main(["top", "127.0.0.1:7702"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert ": training, step 1/" in first and ": stopped (enough)" in last
    # One that lasts is an error, in one line.
    answers[:] = [view(history(opening(), step(1))), *[LinkError("it does not answer")] * 2]
    monkeypatch.setattr(top, "OUTAGE_SECONDS", -1.0)
    assert main(["top", "127.0.0.1:7702"]) == 1
    assert capsys.readouterr().err == "thinwire: error: it does not answer\n"


def test_a_history_is_followed_while_it_grows(tmp_path: Path) -> None:
    watch = HistoryWatch(tmp_path)
    assert watch.view().state == "starting"
    write(tmp_path, *opening()[1:], *step(1))
    assert watch.view().step == 1
    with (tmp_path / HISTORY_FILE).open("a") as file:
        whole = json.dumps({"at": BEGAN, **json.loads(step(2)[1].to_json())})
        file.write(whole[:20])
        file.flush()
        assert watch.view().step == 1, "half a line is not read"
        file.write(whole[20:] + "\n")
    assert watch.view().step == 2


@pytest.mark.parametrize(("goodput", "shown"), [(None, False), (0.9, True), (1.0, False)])
def test_goodput_is_shown_when_work_was_lost(goodput: float | None, shown: bool) -> None:
    lines = view_lines(replace(view(history(opening(), step(1))), goodput=goodput), BEGAN)
    assert any("goodput" in line for line in lines) is shown
