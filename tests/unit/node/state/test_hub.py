"""Checkpoints of the hub, from a local server: redirects, ranges, errors, cut connections."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from aiohttp import web
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from node.config.schema import ModelSection
from node.model.units import unit_names
from node.state import hub as module
from node.state.hub import Repository, hub_files
from node.state.start import check_weights, open_source, read_units
from node.state.weights import Checkpoint
from tests.support.cases import each
from tests.support.families import CONFIGS, SIZES, make
from tests.support.paths import python_path
from wire.errors import ConfigError, DataError

COMMIT = 40 * "a"
NAME = "owner/model"
FILE = "model.safetensors"
Answer = Callable[[web.Request], web.Response]


@dataclass
class Hub:
    """What the server has and how it misbehaves."""

    folder: Path
    status: int = 0
    """Of the API, instead of an answer."""
    busy: int = 0
    """How many requests of the API are answered by 429."""
    digest: str = ""
    """Of the weights, instead of the right one."""
    odd: list[str] = field(default_factory=list)
    """What the next requests for data get: `cut`, a status, or `whole`."""
    port: int = 0
    paths: list[str] = field(default_factory=list)
    sent: int = 0
    """Bytes of ranges that were asked for and not cut."""
    expected: str | None = "Bearer secret"
    """As `Authorization`, where weights are asked for."""
    tokens: set[str | None] = field(default_factory=set)
    """What came as `Authorization`."""

    def _asked(self, request: web.Request) -> None:
        self.paths.append(request.path)
        self.tokens.add(request.headers.get("Authorization"))

    async def api(self, request: web.Request) -> web.Response:
        self._asked(request)
        if self.busy:
            self.busy -= 1
            return web.Response(status=429, headers={"Retry-After": "0"})
        if self.status:
            missing = {"X-Error-Code": "RepoNotFound"} if self.status == 404 else {}
            return web.Response(status=self.status, headers={"X-Error-Message": "no", **missing})
        if request.match_info["revision"] not in ("main", COMMIT):
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        data = (self.folder / FILE).read_bytes()
        lfs = {"sha256": self.digest or sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        siblings = [{"rfilename": FILE, "size": len(data), "lfs": lfs, "blobId": "b"}]
        return web.json_response({"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings})

    async def resolve(self, request: web.Request) -> web.Response:
        """Weights are elsewhere; small files are here."""
        name = request.match_info["file"]
        self._asked(request)
        if name == FILE:
            assert request.headers.get("Authorization") == self.expected
            raise web.HTTPFound(f"http://127.0.0.1:{self.port}/data")
        path = self.folder / name
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{sha256(name.encode()).hexdigest()[:40]}"'}
        if not path.is_file():
            return web.Response(status=404, headers={**headers, "X-Error-Code": "EntryNotFound"})
        return web.Response(body=path.read_bytes(), headers=headers)

    async def data(self, request: web.Request) -> web.StreamResponse:
        assert "Authorization" not in request.headers, "tokens stay with the hub"
        whole = (self.folder / FILE).read_bytes()
        odd = self.odd.pop(0) if self.odd else ""
        if odd == "whole":
            return web.Response(body=whole)
        if odd.isdigit():
            return web.Response(status=int(odd), headers={"Retry-After": "0"})
        first, last = request.headers["Range"].removeprefix("bytes=").split("-")
        part = whole[int(first) : int(last) + 1]
        response = web.StreamResponse(
            status=206,
            headers={
                "Content-Range": f"bytes {first}-{last}/{len(whole)}",
                "Content-Length": str(len(part)),
            },
        )
        await response.prepare(request)
        if odd == "cut":
            await response.write(part[: len(part) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        self.sent += len(part)
        await response.write(part)
        return response


@contextlib.asynccontextmanager
async def serving(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The hub at one origin, its data at another."""
    front, back = web.Application(), web.Application()
    front.router.add_get("/api/models/owner/model/revision/{revision:.*}", hub.api)
    front.router.add_route("*", "/owner/{model}/resolve/{revision}/{file}", hub.resolve)
    back.router.add_get("/data", hub.data)
    runners = [web.AppRunner(application) for application in (front, back)]
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runners[0].addresses[0][1]}"
    hub.port = runners[1].addresses[0][1]
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    try:
        async with asyncio.timeout(240):
            yield
    finally:
        for runner in runners:
            await runner.cleanup()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setitem(SIZES, "hidden_size", 128)
    monkeypatch.setitem(SIZES, "intermediate_size", 256)
    make("llama2").save_pretrained(tmp_path / "files")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(module.Backoff, "advance", lambda _: 0.0)
    return Hub(tmp_path / "files")


def model(hub: Hub, name: str) -> ModelSection:
    return ModelSection(**{**open_source(str(hub.folder), {"sequence": 64}).model, "from_": name})


async def test_a_stage_reads_its_own_bytes_over_a_bad_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "llama2" in CONFIGS
    here, there = model(hub, str(hub.folder)), model(hub, f"hf://{NAME}")
    units = unit_names(here)[2:4]
    pinned = Repository(NAME, COMMIT)
    async with serving(hub, monkeypatch):
        async with hub_files(pinned) as files:
            await Checkpoint(files).read(there, units)
        sent = hub.sent
        hub.odd, hub.busy = ["429", "", "cut", "503", "cut", "cut"], 2
        async with hub_files(pinned) as files:
            found = await Checkpoint(files).read(there, units)
            fetched = files.fetched
    assert not hub.odd and not hub.busy
    assert sent == fetched, "what came before a cut is not fetched again"
    expected = await read_units(here, units)
    own = 0
    for unit in units:
        for name, array in expected[unit].items():
            assert np.array_equal(array, found[unit][name])
            own += array.nbytes
    assert own < fetched <= 1.02 * own
    assert all(f"/{COMMIT}/" in path for path in hub.paths if "resolve" in path), "the revision is pinned"


@pytest.mark.parametrize(("token", "sent"), [(True, "Bearer secret"), (False, None)])
async def test_the_hub_gets_a_token_only_if_it_may(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: bool, sent: str | None
) -> None:
    """A volunteer's is theirs: the run's coordinator says which repository is read."""
    hub.expected = sent
    there = model(hub, f"hf://{NAME}")
    async with serving(hub, monkeypatch):
        await read_units(there, unit_names(there), token=token)
        assert hub.tokens == {sent}
        hub.status = 401
        with pytest.raises(DataError, match="HF_TOKEN" if token else f"join with --hub {NAME}"):
            await read_units(there, unit_names(there), token=token)


async def test_a_gguf_repository_is_named_as_such(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub.folder / "config.json").unlink()
    monkeypatch.setattr("node.state.start.resolve", lambda repository: Repository(repository.name, COMMIT))
    async with serving(hub, monkeypatch):
        with pytest.raises(DataError, match=r"lacks a file: .*404.*the GGUF file was made from"):
            await asyncio.to_thread(open_source, "hf://owner/model-GGUF", {})


READ = """
import asyncio, hashlib, logging, sys
from node.state.start import check_weights, open_source, read_units
from node.config.schema import ModelSection
from node.model.units import unit_names
logging.basicConfig(level=logging.DEBUG)
source = open_source(sys.argv[1], {"sequence": 64})
model = ModelSection(**{**source.model, "from_": source.name})
digest = hashlib.sha256()
for arrays in asyncio.run(read_units(model, unit_names(model))).values():
    for array in arrays.values():
        digest.update(array.tobytes())
print(source.name, digest.hexdigest())
"""


async def test_the_environment_says_which_hub_which_token_and_which_cache(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In processes of their own, as `huggingface_hub` reads its variables when it is imported."""
    async with serving(hub, monkeypatch):

        async def read(revision: str) -> str:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", READ, f"hf://{NAME}@{revision}"),
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
                    "HF_HOME": str(tmp_path / "home"),
                    "HF_ENDPOINT": constants.ENDPOINT,
                    "HF_TOKEN": "secret",
                    "PYTHONPATH": python_path(),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            said, logged = await process.communicate()
            assert process.returncode == 0, logged.decode()
            assert b"secret" not in said + logged
            return said.decode()

        fetched = await read("main")
        assert hub.tokens == {"Bearer secret"}
        assert fetched.startswith(f"hf://{NAME}@{COMMIT} ")
        keep_in_cache(hub, tmp_path / "home" / "hub")
        hub.paths.clear()
        assert await read(COMMIT) == fetched
        assert hub.paths == [], "all is in the cache"


def keep_in_cache(hub: Hub, cache: Path) -> None:
    """As `hf download` does: the weights are named by their SHA-256, and a link says what they are."""
    folder = cache / f"models--{NAME.replace('/', '--')}"
    blobs, snapshot = folder / "blobs", folder / "snapshots" / COMMIT
    for directory in (blobs, snapshot, folder / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for name in (FILE, "config.json"):
        data = (hub.folder / name).read_bytes()
        blob = blobs / sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob.name))


async def test_a_hub_that_does_not_answer_is_not_missed_where_all_is_in_the_cache(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = model(hub, f"hf://{NAME}@main")
    units = unit_names(there)
    hub.status = 500
    async with serving(hub, monkeypatch):
        with pytest.raises(DataError, match="cannot be reached"):
            await read_units(there, units)
        keep_in_cache(hub, tmp_path / "cache")
        source = await asyncio.to_thread(open_source, f"hf://{NAME}@main", {"sequence": 64})
        assert source.name == f"hf://{NAME}@{COMMIT}"
        found = await read_units(there, units)
        blob = (tmp_path / "cache").rglob(FILE)
        with next(blob).resolve().open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")
        with pytest.raises(DataError, match="is damaged: its SHA-256"):
            await read_units(there, units)
    expected = await read_units(model(hub, str(hub.folder)), units)
    for unit in units:
        assert found[unit].keys() == expected[unit].keys()
        assert all(np.array_equal(array, found[unit][name]) for name, array in expected[unit].items())


def test_a_hub_that_does_not_answer_is_asked_once_for_all_files(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_in_cache(hub, tmp_path / "cache")
    asked = []

    def fetch(*args: Any, **options: Any) -> Any:
        if not options["local_files_only"]:  # the library tries for half a minute
            asked.append(args)
            raise LocalEntryNotFoundError("no connection")
        return fetch_cached(*args, **options)

    fetch_cached = huggingface_hub.hf_hub_download
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    source = open_source(f"hf://{NAME}@{COMMIT}", {"sequence": 64})
    assert source.name == f"hf://{NAME}@{COMMIT}" and len(asked) == 1
    assert "count as absent: adapter_config.json, tokenizer.json" in caplog.text
    with pytest.raises(DataError, match="no connection"):
        open_source(f"hf://{NAME}@{COMMIT[1:]}b", {})


@each(
    ("endpoint", "answer"),
    [
        ("http://127.0.0.1:{}", None),
        ("http://127.0.0.1:{}", b""),
        ("http://127.0.0.1:{}", b"nonsense\r\n\r\n"),
        ("http://127.0.0.1:{}", b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n<p>Login</p>"),
        ("http://127.0.0.1:{}", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
        ("https://127.0.0.1:{}", b""),
        ("127.0.0.1:{}", b""),
        ("http://[::", b""),
        ("http://nowhere.invalid", b""),
    ],
)
async def test_what_is_no_hub_is_one_line_and_not_missed_where_all_is_in_the_cache(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str, answer: bytes | None
) -> None:
    """No network, a name that nobody knows, a login page, a proxy: the library's own errors."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer or b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if answer is None:
        server.close()
    monkeypatch.setattr(constants, "ENDPOINT", endpoint.format(port))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    try:
        with pytest.raises(DataError, match="cannot be reached") as caught:
            await asyncio.to_thread(open_source, f"hf://{NAME}", {"sequence": 64})
        assert "\n" not in str(caught.value)
        keep_in_cache(hub, tmp_path / "cache")
        source = await asyncio.to_thread(open_source, f"hf://{NAME}", {"sequence": 64})
        assert source.name == f"hf://{NAME}@{COMMIT}"
    finally:
        server.close()


async def test_a_run_file_names_a_model_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(hub, monkeypatch):
        source = await asyncio.to_thread(open_source, f"hf://{NAME}@main", {"sequence": 64})
        await check_weights(ModelSection(**{**source.model, "from_": source.name}))
    assert source.name == f"hf://{NAME}@{COMMIT}"
    assert 0 < hub.sent < 0.02 * (hub.folder / FILE).stat().st_size, "headers alone"
    assert source.model == open_source(str(hub.folder), {"sequence": 64}).model
    assert source.tokenizer == ""


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"busy": 20}, r"cannot be read now: the hub is busy \(HTTP 429\); start again in 1 s"),
        ({"status": 404}, "does not exist or is private: check the name"),
        ({"status": 401}, "does not exist or is private: .* HF_TOKEN"),
        ({"odd": ["401"]}, r"may not be read \(HTTP 401\).*HF_TOKEN"),
        ({"odd": ["403"]}, r"may not be read \(HTTP 403\).*HF_TOKEN"),
        ({"odd": ["404"]}, f"has no file {FILE}"),
        ({"odd": ["whole"]}, "does not answer range requests"),
        ({"odd": 20 * ["500"]}, "cannot be fetched"),
        ({"digest": 64 * "0"}, "its SHA-256 is .*, expected 0000"),
    ],
)
async def test_what_goes_wrong_is_one_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], line: str
) -> None:
    for name, value in change.items():
        setattr(hub, name, value)
    there = model(hub, f"hf://{NAME}")
    async with serving(hub, monkeypatch):
        with pytest.raises(DataError, match=line) as caught:
            await read_units(there, unit_names(there))
    assert "\n" not in str(caught.value)


async def test_a_repository_of_adapters_is_named_as_such(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no config.json."""
    (hub.folder / "config.json").rename(hub.folder / "adapter_config.json")
    async with serving(hub, monkeypatch):
        with pytest.raises(ConfigError, match=r"contains adapters \(adapter_config.json\)"):
            await asyncio.to_thread(open_source, f"hf://{NAME}", {})


async def test_a_revision_that_is_not_there_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(hub, monkeypatch):
        with pytest.raises(DataError, match="owner/model has no revision v9"):
            await asyncio.to_thread(open_source, f"hf://{NAME}@v9", {})


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a folder or hf://owner/name@revision"):
        Repository.parse("hf://model")


@pytest.mark.parametrize(
    "name", ["../..", "a/..", "owner/model@..", "owner/model@a/../b", "a/" + 99 * "b", "a/b@" + 999 * "c"]
)
def test_what_names_no_repository_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Repository.parse(f"hf://{name}")
