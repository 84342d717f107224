"""Layers in an object store: a folder, fsspec's memory, and S3's protocol."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.stage.snapshot_transfer import check_store
from node.training.object_store import ObjectStore, run_folder, wrong_url
from tests.support.s3 import s3_server
from wire.errors import RunError, UserError


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("fsspec")
    with contextlib.ExitStack() as stack:
        match request.param:
            case "file":
                yield f"file://{tmp_path}/store"
            case "memory":
                yield f"memory://{tmp_path.name}"
            case _:
                yield f"{stack.enter_context(s3_server(monkeypatch))}/folder"


def test_a_layer_comes_back_and_a_snapshot_can_be_removed(url: str) -> None:
    store = ObjectStore(run_folder(url, "run1"))
    data = bytes(range(256)) * 100
    store.put(100, "block.0000", data)
    store.put(100, "head", b"old")
    store.put(100, "head", b"new")
    store.put(200, "head", b"later")
    store.put_record("{}")
    other = ObjectStore(f"{url}/run1/")
    assert other.get(100, "block.0000", len(data)) == data
    assert other.get(100, "block.0000", 10) == data[:10], "no more than is asked for"
    assert (other.get(100, "head", 100), other.record()) == (b"new", b"{}")
    store.drop(100)
    store.drop(100)
    with pytest.raises(RunError, match=r"head\.safetensors in the object store .*: .*check that"):
        store.get(100, "head", 100)
    assert store.get(200, "head", 100) == b"later"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "expected SCHEME://"),
        ("s3://key:secret@host/bucket", "without credentials"),
        ("s3://bucket/a?token=1", "without credentials"),
        ("ftpx://bucket/a", "fsspec knows no 'ftpx'"),
    ],
)
def test_what_cannot_be_a_store_is_refused_in_a_run_file(url: str, why: str) -> None:
    pytest.importorskip("fsspec")
    assert why in (wrong_url(url) or "")
    with pytest.raises(UserError, match="cannot hold snapshots"):
        ObjectStore(url)


def test_a_node_writes_only_where_its_owner_lets_it() -> None:
    pytest.importorskip("fsspec")
    check_store("coordinator", "")
    check_store("file:///srv/store/run1", "file:///srv/store")
    check_store("file:///srv/store", "file:///srv/store/")
    for allowed in ("", "file:///srv/sto", "file:///srv/store/run1/more"):
        with pytest.raises(UserError, match="join with --store file:///srv/store/run1 to let it"):
            check_store("file:///srv/store/run1", allowed)
