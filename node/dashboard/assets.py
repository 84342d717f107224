"""The page's files, as they are installed with the program: read once, sent as they are."""

import hashlib
import importlib.resources
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One file."""

    body: bytes
    content_type: str
    etag: str


@cache
def assets() -> MappingProxyType[str, Asset]:
    """By the path that they are served at."""
    found = {}
    for file in importlib.resources.files("node.dashboard").joinpath("page").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        body = file.read_bytes()
        path = "/" if file.name == "index.html" else f"/{file.name}"
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        found[path] = Asset(body=body, content_type=CONTENT_TYPES[suffix], etag=etag)
    return MappingProxyType(found)
