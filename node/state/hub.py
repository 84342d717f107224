"""Reads checkpoints on the hub, `hf://owner/name@revision`, through `huggingface_hub` and HTTP range
requests.

`huggingface_hub` resolves revisions and finds tokens and cached files, so HF_HOME, HF_ENDPOINT and HF_TOKEN
apply. It cannot read a byte range of a file, so this module requests ranges. A revision is pinned to its
commit, and a broken connection is continued. Files in the cache are not requested.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from wire.errors import ConfigError, DataError, shortened
from wire.pacing import Backoff

if TYPE_CHECKING:
    # Every node imports this module, but few access the hub.
    import aiohttp

PREFIX = "hf://"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NOT_GGUF = (
    "set model.from to the model that the GGUF file was made from, with config.json and safetensors files"
)
PIECE_BYTES = 32 << 20
"""The longest single request."""
ATTEMPTS = 6
"""The number of attempts without progress after which a request fails."""
MOST_PAUSE_SECONDS = 60.0
"""The longest pause, even if `Retry-After` is longer."""
_NAME = re.compile(r"hf://(?!.*\.\.)(\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@(\w[\w./-]{0,199}))?")
_CACHED = re.compile(r"/models--([\w.-]+--[\w.-]+)/snapshots/([0-9a-f]{40})/?$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_AGAIN = {408, 429, 500, 502, 503, 504}
_BUSY = {429, 503}


@dataclass(frozen=True, slots=True)
class Repository:
    """A model on the hub at a revision."""

    name: str
    revision: str
    token: bool = True
    """Whether to send the token of this machine's user."""
    cached: bool = False
    """Whether the hub does not answer, so that only the cache is read."""

    @classmethod
    def parse(cls, text: str, *, token: bool = True) -> "Repository":
        """Parse `hf://owner/name@revision`. Raises ConfigError for anything else."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"model.from {shortened(text)!r}: expected a folder or hf://owner/name@revision"
            )
        return cls(match[1], match[2] or "main", token)

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file's size in bytes, and its SHA-256 in hex if the hub knows it."""

    size: int
    sha256: str


class HubUnreachableError(DataError):
    """The hub does not answer, or the answer is not from a hub."""


class HubBusyError(HubUnreachableError):
    """The hub asks the client to wait for `pause` seconds."""

    def __init__(self, message: str, pause: float) -> None:
        super().__init__(message)
        self.pause = pause


def resolve(repository: Repository) -> Repository:
    """The repository at the commit of its revision, or at the cached commit if the hub cannot be reached.

    Raises DataError.
    """
    if is_pinned(repository):
        return repository
    try:
        return pin(repository)[0]
    except HubUnreachableError:
        known = cached_file(repository, "config.json")
        if known is None or not _COMMIT.fullmatch(known.parent.name):
            raise
        return replace(repository, revision=known.parent.name, cached=True)


def hub_repository(source: str) -> Repository | None:
    """The repository that `model.from` names, directly or as a folder of the hub's cache; None otherwise."""
    if source.startswith(PREFIX):
        return Repository.parse(source)
    match = _CACHED.search(source)
    return Repository(match[1].replace("--", "/", 1), match[2]) if match else None


def pin(repository: Repository) -> tuple[Repository, dict[str, FileInfo]]:
    """The repository at the commit of its revision, and its files. Raises DataError."""
    hub = _library()
    with _one_line(repository):
        info = hub.HfApi().model_info(
            repository.name,
            revision=repository.revision,
            files_metadata=True,
            timeout=30.0,
            token=None if repository.token else False,
        )
    files = {
        file.rfilename: FileInfo(file.size or 0, (file.lfs or {}).get("sha256", ""))
        for file in info.siblings or ()
    }
    return replace(repository, revision=str(info.sha)), files


def download(repository: Repository, name: str, *, required: bool = True) -> Path | None:
    """The cached path of a small file, downloaded if necessary; None if it cannot be had and is not
    `required`. Raises DataError, and HubUnreachableError also for a file that is not required."""
    hub = _library()
    cached = hub.try_to_load_from_cache(repository.name, name, revision=repository.revision)
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None and not required:
        return None  # the cache records that the file does not exist
    try:
        with _one_line(repository):
            return Path(
                hub.hf_hub_download(
                    repository.name,
                    name,
                    revision=repository.revision,
                    token=None if repository.token else False,
                    local_files_only=repository.cached,
                )
            )
    except DataError as error:
        if required or isinstance(error, HubUnreachableError):
            raise
        return None


def cached_file(repository: Repository, name: str) -> Path | None:
    """The path of a file of this revision in the local cache, or None."""
    try:
        path = _library().try_to_load_from_cache(repository.name, name, revision=repository.revision)
    except DataError:
        return None
    return Path(path) if isinstance(path, str) else None


class HubFiles:
    """Implements `node.state.weights.Files` for a pinned repository, from the cache or by range requests."""

    piece_bytes = PIECE_BYTES

    def __init__(self, repository: Repository, session: "aiohttp.ClientSession") -> None:
        self.where = str(repository)
        self.fetched = 0
        """The number of bytes received over the network."""
        self._repository = repository
        self._session = session
        self._files: dict[str, FileInfo] | None = None
        """The hub's list of files; None before it was requested."""

    async def size(self, name: str) -> int | None:
        if (cached := await self._cached(name)) is not None:
            return cached.stat().st_size
        if self._files is None:
            if name == SINGLE and await self._cached(INDEX) is not None:
                return None  # the cache has the weights in several files
            self._files = await self._listed()
        info = self._files.get(name)
        return None if info is None else info.size

    def digest(self, name: str) -> str:
        if self._files is not None and name in self._files:
            return self._files[name].sha256
        # The cache names a large file by its SHA-256.
        cached = cached_file(self._repository, name)
        blob = cached.resolve().name if cached is not None else ""
        return blob if _SHA256.fullmatch(blob) else ""

    async def _listed(self) -> dict[str, FileInfo]:
        """The hub's list of files. A busy hub is asked again."""
        backoff = Backoff(0.5, 8.0)
        for _ in range(ATTEMPTS - 1):
            try:
                return (await asyncio.to_thread(pin, self._repository))[1]
            except HubBusyError as error:
                await asyncio.sleep(max(error.pause, backoff.advance()))
        return (await asyncio.to_thread(pin, self._repository))[1]

    async def _cached(self, name: str) -> Path | None:
        return await asyncio.to_thread(cached_file, self._repository, name)

    async def read(self, name: str, start: int, end: int) -> bytes:
        import aiohttp

        if (cached := await self._cached(name)) is not None:
            return await asyncio.to_thread(read_range, cached, start, end)
        url = _library().hf_hub_url(self._repository.name, name, revision=self._repository.revision)
        data, backoff, failures = bytearray(), Backoff(0.5, 8.0), 0
        while True:
            before = len(data)
            pause = 0.0
            try:
                pause = await self._request(url, name, start, end, data)
                reason = "the hub asks to wait"
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                reason = str(error) or type(error).__name__
            if len(data) == end - start:
                return bytes(data)
            failures = 0 if len(data) > before else failures + 1
            if failures >= ATTEMPTS:
                raise DataError(
                    f"{self.where}/{name} cannot be fetched: {reason}; check the network and start again"
                )
            if len(data) > before:
                backoff.reset()
            await asyncio.sleep(max(pause, backoff.advance()))

    async def _request(self, url: str, name: str, start: int, end: int, data: bytearray) -> float:
        """Append the bytes that follow `data`. Returns the pause that a busy server asks for, or 0."""
        first = start + len(data)
        headers = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
        async with self._session.get(url, headers=headers | self._authorization()) as response:
            if response.status in _AGAIN:
                return _pause(response.headers)
            if response.status in (401, 403):
                raise DataError(
                    f"{self.where} may not be read (HTTP {response.status}): accept the model's terms on its "
                    f"page and {_with_token(self._repository)}"
                )
            if response.status == 404:
                raise DataError(f"{self.where} has no file {name}")
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if response.status != 206 or match is None or int(match[1]) != first:
                raise DataError(f"{self.where}/{name}: the server does not answer range requests")
            if match[3] != "*" and int(match[3]) != (size := await self.size(name)):
                raise DataError(f"{self.where}/{name} has {match[3]} bytes, expected {size}: it changed")
            async for piece in response.content.iter_chunked(1 << 18):
                taken = piece[: end - start - len(data)]
                data += taken
                self.fetched += len(taken)
        return 0.0

    def _authorization(self) -> dict[str, str]:
        token = _library().get_token() if self._repository.token else None
        return {"Authorization": f"Bearer {token}"} if token else {}


@asynccontextmanager
async def hub_files(repository: Repository) -> AsyncIterator[HubFiles]:
    """The files of a repository at the commit of its revision."""
    import aiohttp

    repository = await asyncio.to_thread(resolve, repository)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        yield HubFiles(repository, session)


def is_pinned(repository: Repository) -> bool:
    """Whether the revision is a commit."""
    return _COMMIT.fullmatch(repository.revision) is not None


def read_range(path: Path, start: int, end: int) -> bytes:
    """The bytes from `start` to `end` of a file. Raises DataError."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if len(data) != end - start:
        raise DataError(f"{path} is truncated: {start + len(data)} of {end} bytes")
    return data


def _pause(headers: Mapping[str, str]) -> float:
    """The pause that a busy server asks for, up to `MOST_PAUSE_SECONDS`."""
    given = headers.get("Retry-After", "")
    return min(float(given), MOST_PAUSE_SECONDS) if given.isdecimal() else 0.0


def _library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise DataError(
            'models on the hub need the huggingface_hub package: pip install "thinwire[hub]"'
        ) from error
    return huggingface_hub


@contextmanager
def _one_line(repository: Repository) -> Iterator[None]:
    """Convert the errors of `huggingface_hub` to DataError with one line."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise DataError(
            f"{repository} is gated: accept its terms on its page and {_with_token(repository)}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _forbidden(repository) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{repository.name} has no revision {repository.revision}") from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(repository, error) from error
    except errors.EntryNotFoundError as error:
        advice = f"; {NOT_GGUF}" if "gguf" in repository.name.lower() else ""
        raise DataError(f"{repository} lacks a file: {str(error).splitlines()[0]}{advice}") from error
    except (errors.HfHubHTTPError, OSError) as error:
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", 0)
        if status in (401, 403):
            raise _forbidden(repository) from error
        if response is not None and status in _BUSY:
            pause = _pause(response.headers)
            raise HubBusyError(
                f"{repository} cannot be read now: the hub is busy (HTTP {status}); start again in "
                f"{max(pause, 1.0):.0f} s",
                pause,
            ) from error
        raise _unreachable(repository, error) from error
    except Exception as error:  # of its HTTP client, and of an answer or a setting that it does not expect
        raise _unreachable(repository, error) from error


def _unreachable(repository: Repository, error: Exception) -> HubUnreachableError:
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    return HubUnreachableError(
        f"{repository} cannot be reached ({reason}): check network, proxy, HF_ENDPOINT and HF_TOKEN"
    )


def _forbidden(repository: Repository) -> DataError:
    return DataError(
        f"{repository} does not exist or is private: check the name, or {_with_token(repository)}"
    )


def _with_token(repository: Repository) -> str:
    """Advice on how to send a token to the hub."""
    if repository.token:
        return "set HF_TOKEN to your token"
    return f"set HF_TOKEN to your token and join with --hub {repository.name}"
