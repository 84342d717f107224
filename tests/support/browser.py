"""A real browser without a screen: Chromium, driven through its DevTools protocol.

    async with Browser(tmp_path) as browser:
        page = await browser.open("http://127.0.0.1:7702/", width=390, dark=True)
        await page.wait_for("document.title !== ''")

A page records its errors and warnings (`problems`) and the addresses it requests (`requests`).
"""

import asyncio
import base64
import contextlib
import itertools
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

SECONDS = 90.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


def chromium() -> str | None:
    """Chromium's path, if it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A Chromium process with a fresh profile; killed at the end."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self._profile = directory / "profile"
        self._flags = flags
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def __aenter__(self) -> Self:
        command = chromium()
        assert command is not None
        self._process = await asyncio.create_subprocess_exec(
            command,
            *FLAGS,
            *self._flags,
            f"--user-data-dir={self._profile}",
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._stack = contextlib.AsyncExitStack()
        try:
            async with asyncio.timeout(SECONDS):
                address = await self._address()
            session = await self._stack.enter_async_context(aiohttp.ClientSession())
            self._socket = await session.ws_connect(address, max_msg_size=0)
            self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._drain())]
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, AssertionError):
            async with asyncio.timeout(5):
                await self.call("Browser.close")
                await self._process.wait()
        await self._socket.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end()

    async def open(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False
    ) -> "Page":
        """A page of that size and theme at `url`, loaded."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.resize(width, height, phone=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme])
        await page.go(url)
        return page

    async def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command; returns its answer."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json(message)
        async with asyncio.timeout(SECONDS):
            said = await answer
        assert "error" not in said, f"{method}: {said['error']}"
        result: dict[str, Any] = said["result"]
        return result

    async def _address(self) -> str:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            _, found, address = line.decode().partition("DevTools listening on ")
            if found:
                return address.strip()
        raise AssertionError("Chromium ended before it listened")

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if not answer.done():  # nobody waits for one that came too late
                    answer.set_result(said)
            elif (page := self._pages.get(said.get("sessionId", ""))) is not None:
                page.heard(said["method"], said["params"])

    async def _drain(self) -> None:
        """Its log would fill the pipe."""
        assert self._process.stderr is not None
        while await self._process.stderr.read(65536):
            pass

    async def _end(self) -> None:
        await self._stack.aclose()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self._loaded = asyncio.Event()
        self.width = 0
        """Of the screen. A page that does not fit is laid out wider on a phone, its own width too."""
        self.problems: list[str] = []
        """Errors and warnings in its console, exceptions, requests that its policy forbade."""
        self.requests: list[str] = []
        """Addresses that it requested."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **parameters)

    async def go(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(SECONDS):
            await self._loaded.wait()

    async def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.width = width
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise's when it is kept. AssertionError if it throws."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Until the expression is true, looked at with each frame that the page draws."""
        watch = (
            f"new Promise((done) => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20);"
            " look(); })"
        )
        try:
            await self.evaluate(watch)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never true: {condition}\n{self.problems}\n{text}") from None

    async def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        said: str = await self.evaluate(f"document.querySelector({selector!r}).innerText")
        return said

    async def texts(self, selector: str) -> list[str]:
        said: list[str] = await self.evaluate(
            f"[...document.querySelectorAll({selector!r})].map((node) => node.innerText)"
        )
        return said

    async def screenshot(self, path: Path, *, whole: bool = True) -> bytes:
        """A PNG of the whole page, or of what is in view."""
        if whole:
            size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        else:
            answer = await self.call("Page.captureScreenshot")
        image = base64.b64decode(answer["data"])
        await asyncio.to_thread(path.write_bytes, image)
        return image

    def heard(self, method: str, said: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                details = said["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(part.get("value", "")) for part in said["args"]))
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
