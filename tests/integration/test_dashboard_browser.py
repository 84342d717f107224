"""The page in a real browser: both themes, a wide screen and a phone, from a history and from a live run.

Set THINWIRE_SCREENSHOTS to a folder to keep the pictures.
"""

import itertools
import json
import os
import re
import struct
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from node.coordinator.store import Store
from node.dashboard.feed import Feed
from node.dashboard.operator import KEY_FILE, ChangeGuard, Operator, OperatorKey
from node.dashboard.server import Page, serve_page
from node.telemetry import events
from node.telemetry.history import read_history
from node.view.checkpoint import read_view
from node.view.view_builder import RunViewBuilder
from tests.support.browser import Browser, chromium
from tests.support.browser import Page as Tab
from tests.support.fault_prefork import Prefork
from tests.support.ports import free_port
from tests.support.recorded_run import HOSTILE, append, write_run
from tests.support.recorded_run import step as recorded_step
from tests.support.run_harness import SMALL, Run
from wire.identity.token import JoinToken

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="needs Chromium (Debian: apt install chromium)"),
    pytest.mark.timeout(240),
]

SCREENS = {
    "wide": {"width": 1280, "height": 900},
    "phone": {"width": 390, "height": 844, "phone": True},
    "narrow": {"width": 360, "height": 740, "phone": True},
}


@asynccontextmanager
async def recorded(directory: Path, *, port: int = 0, **kind: Any) -> AsyncIterator[tuple[str, Feed]]:
    """The address of the page of an invented run, and what feeds it. `port` 0 is any free one."""
    write_run(directory, **kind)
    feed = Feed(read_view(directory)[0])
    async with serve_page(Page(feed=feed), "127.0.0.1", port) as bound:
        yield f"http://127.0.0.1:{bound}/", feed


async def shown(tab: Tab) -> None:
    """Wait until the view is drawn."""
    await tab.wait_for(
        "document.querySelectorAll('.stage').length && document.querySelector('#loss-chart .line')"
    )


async def assert_sound(tab: Tab, url: str) -> None:
    """No errors, no requests to other hosts, and nothing wider than the screen."""
    assert tab.problems == []
    assert tab.requests and all(asked.startswith(url) for asked in tab.requests), tab.requests
    await assert_wide_enough(tab)


async def assert_wide_enough(tab: Tab) -> None:
    widths = await tab.evaluate(
        "[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]"
    )
    assert max(widths) <= tab.width, widths
    cut_off = await tab.evaluate(
        "[...document.querySelectorAll('main *')].filter((n) => n.getClientRects().length "
        f"&& n.getBoundingClientRect().right > {tab.width} + 0.5).map((n) => n.className || n.tagName)"
    )
    assert cut_off == []


def pixels(png: bytes) -> tuple[int, int, bytes]:
    """Width, height and the RGB bytes of a PNG as Chromium writes them (8 bits, RGB or RGBA)."""
    width, height, depth, colour = struct.unpack(">IIBB", png[16:26])
    assert depth == 8 and colour in (2, 6)
    channels = 3 if colour == 2 else 4
    packed, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            packed += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, stride, rows = zlib.decompress(packed), width * channels, []
    before = bytearray(stride)
    for row in range(height):
        kind, line = (
            raw[row * (stride + 1)],
            bytearray(raw[row * (stride + 1) + 1 : (row + 1) * (stride + 1)]),
        )
        for i in range(stride):
            left = line[i - channels] if i >= channels else 0
            corner = before[i - channels] if i >= channels else 0
            line[i] = (line[i] + _predicted(kind, left, before[i], corner)) & 0xFF
        rows.append(bytes(line))
        before = line
    flat = b"".join(rows)
    if channels == 4:
        flat = b"".join(flat[i : i + 3] for i in range(0, len(flat), 4))
    return width, height, flat


def _predicted(kind: int, left: int, above: int, corner: int) -> int:
    """PNG's row filters, RFC 2083 section 6."""
    if kind < 3:
        return (0, left, above)[kind]
    if kind == 3:
        return (left + above) // 2
    estimate = left + above - corner
    return min((left, above, corner), key=lambda value: abs(estimate - value))


async def picture(tab: Tab, name: str, directory: Path) -> bytes:
    keep = Path(os.environ.get("THINWIRE_SCREENSHOTS") or directory)
    return await tab.screenshot(keep / f"{name}.png")


async def test_a_recorded_run_looks_right_on_every_screen_and_in_both_themes(tmp_path: Path) -> None:
    async with recorded(tmp_path / "run") as (url, feed), Browser(tmp_path) as browser:
        for (screen, size), dark in itertools.product(SCREENS.items(), (False, True)):
            tab = await browser.open(url, dark=dark, **size)
            await shown(tab)
            await assert_sound(tab, url)
            await assert_shows(tab, (await feed.newest())[1])
            assert HOSTILE in await tab.text("#nodes") and HOSTILE in await tab.text("#samples")
            assert "owned" not in await tab.evaluate("document.title")
            assert await tab.evaluate("document.querySelectorAll('main img, main script').length") == 0
            await assert_figures_are_whole(tab)
            image = await picture(tab, f"page-{screen}-{'dark' if dark else 'light'}", tmp_path)
            assert len(image) > 20_000
            await tab.resize(64, 64)
            width, height, colours = pixels(await tab.screenshot(tmp_path / "corner.png", whole=False))
            assert (width, height) == (64, 64)
            ground = colours[:3]
            assert (max(ground) < 40) if dark else (min(ground) > 220), ground.hex()


async def assert_shows(tab: Tab, view: dict[str, Any]) -> None:
    """The numbers on the page are those of the view."""
    assert await tab.text("#name") == view["name"]
    assert f"{view['loss']:.4f}" in await tab.text("#figure-loss")
    assert f"step {view['step']} of {view['steps']}" in await tab.text("#progress-text")
    first = await tab.text(".verdict")
    assert [first.lower(), *await tab.texts("#bottleneck .muted")][: len(view["bottleneck"])] == [
        line.replace("`", "").lower() if i == 0 else line.replace("`", "")
        for i, line in enumerate(view["bottleneck"])
    ]
    for stage in view["stages"]:
        card = await tab.text(f".stage[data-stage='{stage['stage']}']")
        assert stage["node_id"] in card
        assert f"busy {round(100 * stage['busy'])}\xa0%" in card
        assert f"waits {round(100 * stage['waiting'])}\xa0%" in card
        shares = await tab.evaluate(
            "(() => { const bar = document.querySelector("
            f"\".stage[data-stage='{stage['stage']}'] .shares\");"
            " const whole = bar.getBoundingClientRect().width;"
            " return Object.fromEntries([...bar.children].map((part) =>"
            " [part.className.replace('kind ', ''), part.getBoundingClientRect().width / whole])); })()"
        )
        for kind, share in stage["shares"].items():
            assert shares.get(kind, 0.0) == pytest.approx(share, abs=0.01)
    for link in view["links"]:
        lane = await tab.text(f".lane[data-way='{link['source']}-{link['target']}']")
        for flow in link["flows"]:
            assert f"{flow['codec']}, {flow['bits_per_element']:.2f}\xa0bits per element" in lane
        if link["little_used"]:
            assert "Mbit/s, little used" in lane and f" of {link['capacity_mbit']:.0f}" not in lane
        elif link["capacity_mbit"]:
            assert f"{round(100 * link['use'])}\xa0%" in lane
    # Links marked as full are those that are full in the view.
    marked = await tab.evaluate(
        "[...document.querySelectorAll('.lane.full')].map((lane) => lane.dataset.way)"
    )
    assert marked == [f"{link['source']}-{link['target']}" for link in view["links"] if link["full"]] != []
    nodes = await tab.text("#nodes")
    assert all(member["node_id"] in nodes for member in view["members"])
    newest = view["events"][-1]
    assert newest["text"] in await tab.text("#events li:first-child")
    sampled = [one for one in view["samples"] if one["step"] == view["samples"][-1]["step"]]
    assert await tab.texts("#samples li") == [f"{one['prompt']} {one['text']}" for one in sampled]


async def assert_figures_are_whole(tab: Tab) -> None:
    cut = "[...document.querySelectorAll('#figures p')].filter((p) => p.scrollWidth > p.clientWidth).length"
    assert await tab.evaluate(cut) == 0


async def test_held_out_losses_are_on_the_chart_and_routine_events_are_folded(tmp_path: Path) -> None:
    async with recorded(tmp_path / "run", stages=2) as (url, feed), Browser(tmp_path) as browser:
        tab = await browser.open(url)
        await shown(tab)
        view = (await feed.newest())[1]
        held = "[...document.querySelectorAll('#loss-chart .held{}')].map((mark) => +mark.dataset.step)"
        assert await tab.evaluate(held.format("")) == list(view["held_out_curve"]["steps"])
        assert await tab.evaluate(held.format(".best")) == [view["held_out"]["best_step"]] == [160]
        assert await tab.texts("#loss-legend li") == [
            "training",
            "held out",
            f"best held out: {view['held_out']['best']:.4f} at step 160",
        ]
        for chart in ("lr", "grad-norm"):
            newest = view[f"{chart.replace('-', '_')}_curve"]["values"][-1]
            label = await tab.evaluate(
                f"document.querySelector('#{chart}-chart svg').getAttribute('aria-label')"
            )
            assert float(label.split(", ")[1].split()[0]) == pytest.approx(newest, rel=0.01)
        # The legend has the kinds of time that the bars show, and no others.
        kinds = {
            kind for stage in view["stages"] for kind, share in stage["shares"].items() if share >= 0.005
        }
        legend = await tab.evaluate(
            "[...document.querySelectorAll('#legend i')].map((i) => i.className.replace('kind ', ''))"
        )
        assert set(legend) == kinds and "sync" not in kinds
        # Two stages and their link share the width.
        assert await tab.evaluate(
            "document.querySelector('#legend').getBoundingClientRect().right"
            " - document.querySelector(\".stage[data-stage='1']\").getBoundingClientRect().right"
        ) == pytest.approx(0, abs=1)
        folds = await tab.texts("#events .folded button")
        assert folds == ["3 held-out losses, 1 snapshot"] * 2
        await tab.evaluate("document.querySelector('#events .folded button').click()")
        assert await tab.texts("#events .folded button") == folds[1:]
        assert "held-out loss at step 240" in await tab.text("#events")
        await tab.evaluate(
            "(() => { const filter = document.querySelector('#event-filter'); filter.value = 'snapshot';"
            " filter.dispatchEvent(new Event('change')); })()"
        )
        assert await tab.texts("#events .what") == ["snapshot", "snapshot"]
        await assert_sound(tab, url)


async def test_the_page_follows_its_run_and_matches_the_api(tmp_path: Path) -> None:
    async with recorded(tmp_path / "run") as (url, feed), Browser(tmp_path) as browser:
        tab = await browser.open(url)
        await shown(tab)
        now = time.time()
        for number in range(269, 273):
            for event in recorded_step(number):
                feed.apply(event, now)
        feed.apply(events.SnapshotStored(step=272, bytes=1_000_000, path="x"), now)
        await tab.wait_for("document.querySelector('#progress-text').innerText.includes('step 272 of')")
        await tab.wait_for("document.querySelector('#events li').innerText.includes('snapshot of step 272')")
        async with aiohttp.ClientSession() as session, session.get(f"{url}api/view") as response:
            view = (await response.json())["view"]
        await assert_shows(tab, view)
        # The page's view, assembled from patches, equals the server's.
        pieced = await tab.evaluate(
            "import('/stream.js').then(({ Stream }) => new Promise((done) => {"
            " const own = new Stream((view) => done(view), () => {}); }))"
        )
        assert pieced == view
        assert "training" in await tab.text("#state")
        await assert_sound(tab, url)


async def test_charts_answer_to_the_pointer_and_the_keyboard(tmp_path: Path) -> None:
    async with recorded(tmp_path / "run") as (url, feed), Browser(tmp_path) as browser:
        tab = await browser.open(url)
        await shown(tab)
        curve = (await feed.newest())[1]["loss_curve"]
        place = await tab.evaluate(
            "(() => { const box = document.querySelector('#loss-chart').getBoundingClientRect();"
            " return [box.right, box.top, box.height]; })()"
        )
        await tab.call(
            "Input.dispatchMouseEvent", type="mouseMoved", x=place[0] - 3, y=place[1] + place[2] / 2
        )
        await tab.wait_for("!document.querySelector('#loss-chart .tip').hidden")
        tip = await tab.text("#loss-chart .tip")
        assert f"{curve['values'][-1]:.4f}" in tip and f"step {curve['steps'][-1]}" in tip
        await tab.evaluate(
            "document.querySelector('#loss-chart svg').dispatchEvent("
            "new KeyboardEvent('keydown', { key: 'ArrowLeft', cancelable: true }))"
        )
        assert f"{curve['values'][-2]:.4f}" in await tab.text("#loss-chart .tip")
        assert tab.problems == []


async def test_many_stages_and_a_run_that_is_over(tmp_path: Path) -> None:
    over = recorded(tmp_path / "run", stages=8, steps_done=400, ended=True)
    async with over as (url, _), Browser(tmp_path) as browser:
        for screen, size in SCREENS.items():
            tab = await browser.open(url, **size)
            await shown(tab)
            await assert_sound(tab, url)
            await picture(tab, f"page-ended-{screen}", tmp_path)
        assert await tab.text("#state") == "finished"
        assert "all steps are done" in (await tab.text(".verdict")).lower()
        assert await tab.text("#figure-eta h3") == "Ended"
        assert await tab.text("#figure-eta .value") != "–"
        assert await tab.text("#bottleneck-title") == "How it ended"
        assert await tab.texts("#bottleneck .muted") == []
        await assert_figures_are_whole(tab)
        assert len(await tab.texts(".stage")) == 8
        # Its nodes have left, which is no error after the end; their figures stay readable.
        assert await tab.texts(".stage.away") == []
        assert "GPU memory" in await tab.text(".stage[data-stage='7']")


async def test_a_page_comes_back_when_its_server_does(tmp_path: Path) -> None:
    port = free_port()  # a port that no other process gets while the server is away
    async with Browser(tmp_path) as browser:
        async with recorded(tmp_path / "run", port=port) as (url, _):
            tab = await browser.open(url)
            await shown(tab)
        await tab.wait_for("document.querySelector('#connection').className.includes('lost')")
        assert "step 268" in await tab.text("#progress-text")  # what was known stays
        await pass_time(tab, 30)
        await tab.wait_for("document.querySelector('#state').innerText === 'training, connection lost'")
        assert "No answer for" in await tab.text("#silence")
        append(tmp_path / "run", time.time(), recorded_step(269)[1])
        feed = Feed(read_view(tmp_path / "run")[0])
        async with serve_page(Page(feed=feed), "127.0.0.1", port):
            await tab.wait_for("document.querySelector('#connection').className.includes('live')")
            await tab.wait_for("document.querySelector('#progress-text').innerText.includes('step 269 of')")
        failed = re.compile(r"Failed to load resource|net::ERR_")
        assert all(failed.search(problem) for problem in tab.problems), tab.problems


class NoControls:
    """Controls that no operator may use in this test."""

    def stop(self, reason: str) -> None:
        raise AssertionError(reason)

    def save(self) -> None:
        raise AssertionError


async def pass_time(tab: Tab, seconds: float) -> None:
    """Set the page's clock ahead; its timers stay."""
    await tab.evaluate(f"(() => {{ const now = Date.now; Date.now = () => now() + {1000 * seconds}; }})()")


async def test_the_page_tells_a_lost_connection_from_a_stalled_run(tmp_path: Path) -> None:
    """With a coordinator, waiting for nodes is normal and training needs progress; without one, news."""
    write_run(tmp_path / "run", steps_done=20)
    told = list(read_history(tmp_path / "run"))
    training = max(entry.at for entry in told)
    guard = ChangeGuard(OperatorKey("x" * 26))
    with Store.open(tmp_path / "run") as store:
        operator = Operator(NoControls(), store, lambda event: None)
    async with Browser(tmp_path) as browser:
        for coordinated in (True, False):
            for entries, state, doubt in (
                (told[:2], "waiting for nodes", None if coordinated else "no news"),
                (told, "training", "no progress" if coordinated else "no news"),
            ):
                builder = RunViewBuilder()
                for entry in entries:
                    builder.apply(entry.event, entry.at - training + time.time())
                page = Page(feed=Feed(builder))
                if coordinated:
                    page = replace(page, operator=operator, guard=guard)
                async with serve_page(page, "127.0.0.1", 0) as port:
                    tab = await browser.open(f"http://127.0.0.1:{port}/")
                    await tab.wait_for("!document.querySelector('#main').hidden")
                    if state == "training":
                        assert await tab.text("#state") == state
                        await pass_time(tab, 3600)
                    said = state if doubt is None else f"{state}, {doubt}"
                    await tab.wait_for(f"document.querySelector('#state').innerText === {said!r}")
                    hidden = await tab.evaluate("document.querySelector('#silence').hidden")
                    assert hidden is (doubt is None)


async def test_a_live_run_and_its_operator(prefork: Prefork, tmp_path: Path) -> None:
    config = replace(
        SMALL,
        run=replace(SMALL.run, steps=100_000, snapshot_every=100_000),
        pipeline=replace(SMALL.pipeline, stages=2, forward_codec="tah", backward_codec="fixed-8"),
    )
    with Run(tmp_path, config, launch=prefork.popen) as run:
        coordinator = run.start()
        served = coordinator.wait_event(events.PageServed)
        assert served.url.startswith("http://127.0.0.1:")
        made = run.command("token", "create", str(run.run_dir), "--json")
        assert made.wait_exit() == 0
        run.add_nodes(2)
        run.add_node(json.loads(made.lines[0])["token"])
        coordinator.wait_step(3)
        told = run.command("status", str(run.run_dir))
        assert told.wait_exit() == 0 and f"page      {served.url}" in told.lines
        async with Browser(tmp_path) as browser:
            tab = await browser.open(served.url, **SCREENS["phone"])
            await shown(tab)
            await tab.wait_for("document.querySelectorAll('#nodes .spare').length === 1")
            await tab.wait_for("document.querySelectorAll('.lane').length === 2")
            assert await tab.text("#state") in ("training", "restoring")
            assert len(await tab.texts(".stage .shares .forward")) == 2
            await assert_sound(tab, served.url)
            await picture(tab, "page-live-phone", tmp_path)
            # No node's address is on the page or in its data.
            async with aiohttp.ClientSession() as session, session.get(f"{served.url}api/view") as response:
                assert "127.0.0.1" not in json.dumps((await response.json())["view"])

            await tab.evaluate("document.querySelector('#operator').open = true")
            await tab.wait_for("!document.querySelector('#operator-form').hidden")
            await type_key(tab, "not the key")
            await press(tab, "snapshot")
            await tab.wait_for(
                "document.querySelector('#operator-answer').innerText.includes('not the operator')"
            )
            assert coordinator.all(events.SnapshotStored) == []
            await type_key(tab, (run.run_dir / KEY_FILE).read_text().strip())
            await press(tab, "snapshot")
            await tab.wait_for(
                "document.querySelector('#operator-answer').innerText.includes('snapshot follows')"
            )
            coordinator.wait_event(events.SnapshotStored)
            await tab.wait_for("document.querySelector('#figure-snapshot').innerText.includes('step')")

            await press(tab, "token")
            await tab.wait_for("!document.querySelector('#join-line').hidden")
            line = await tab.evaluate("document.querySelector('#join-text').value")
            assert (
                JoinToken.parse(line.removeprefix("thinwire join ")).run_id
                == coordinator.wait_event(events.RunStarted).run_id
            )

            await press(tab, "tokens")
            await tab.wait_for("document.querySelectorAll('#tokens li').length === 3")
            await assert_wide_enough(tab)
            await picture(tab, "page-operator-phone", tmp_path)
            spare = await tab.evaluate(
                "document.querySelector('#nodes .spare').parentElement.firstChild.innerText"
            )
            await tab.evaluate(f"document.querySelector('#evict-node').value = {spare!r}")
            await press(tab, "evict", "evict")
            coordinator.wait_event(events.NodeLeft, lambda left: left.node_id == spare)
            await press(tab, "stop", "stop")
            assert coordinator.wait_exit() in (0, 130)
            finished = coordinator.finished
            assert not finished.failed and "operator" in finished.reason
            await tab.wait_for("['stopped', 'finished'].includes(document.querySelector('#state').innerText)")
            # Its page is complete: no connection is missed.
            assert await tab.text("#connection") in ("the run has stopped", "the run is finished")
        assert (run.run_dir / KEY_FILE).stat().st_mode & 0o777 == 0o600


async def type_key(tab: Tab, text: str) -> None:
    await tab.evaluate(f"document.querySelector('#key').value = {text!r}")


async def press(tab: Tab, *actions: str) -> None:
    """Press an action's button; twice if it asks for confirmation, which it does for a few seconds."""
    clicks = (f"document.querySelector('button[data-action={action}]').click();" for action in actions)
    await tab.evaluate("".join(clicks))
