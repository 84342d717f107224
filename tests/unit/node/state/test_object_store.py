"""Layers in an object store: a folder, fsspec's memory, and S3's protocol."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.stage.snapshot_transfer import check_store
from node.state.manifest import LayerFile
from node.state.object_store import ObjectStore, is_below, run_folder, wrong_url
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
    store.hold((), "{}")
    other = ObjectStore(f"{url}/run1/")
    assert other.get(100, "block.0000", len(data)) == LayerFile.of(data)
    assert other.get(100, "block.0000", 10).data == data[:10], "no more than is asked for"
    assert (other.get(100, "head", 100).data, other.record()) == (b"new", b"{}")
    assert other.steps() == (100, 200)
    store.remove(100)
    store.hold((200,))
    assert other.steps() == (200,) and other.record() == b"{}"
    with pytest.raises(RunError, match=r"head\.safetensors in the object store .*: .*check that"):
        store.get(100, "head", 100)
    assert store.get(200, "head", 100).data == b"later"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "expected SCHEME://"),
        ("s3://key:secret@host/bucket", "without credentials"),
        ("s3://bucket/a?token=1", "without credentials"),
        ("ftpx://bucket/a", "fsspec does not know 'ftpx'"),
        (f"s3://bucket{1000 * '/x'}", "at most 1,000 characters"),
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
    for allowed in ("", "file:///srv/sto", "file:///srv/store/run1/more", "file:///srv/./store"):
        with pytest.raises(UserError, match="join with --store file:///srv/store/run1 to allow it"):
            check_store("file:///srv/store/run1", allowed)


OUTSIDE = [
    ("file:///srv/store", f"file:///srv/store{path}")
    for path in (
        *("/../victim/x", "/..", "/a/../../victim", "//../victim", "/./x", "/ ../victim", "/.../victim"),
        *("/%2e%2e/victim", "/%2E./victim", "/..%2fvictim", "/%252e%252e/victim", "/..%5cvictim"),
        *("/..\\victim", "\\..\\victim", "/x\0/../..", "/x\n", "-evil", "/[a]", "/*", "/~/x", "/x#y"),
        *("::file:///victim", "/x::file:///victim", "/x?y"),
    )
] + [
    (f"{scheme}://allowed/prefix", f"{scheme}://{rest}")
    for scheme in ("s3", "memory", "https", "gs")
    for rest in (
        *(
            "allowed/prefix-evil",
            "allowed/prefix/../other",
            "allowed",
            "allowed/Prefix",
            "allowed.evil/prefix",
        ),
        *("allowed@evil/prefix", "evil@allowed/prefix", "allowed:81/prefix", "allowed/prefix/%2e%2e/other"),
        *("allowed.evil/prefix", "evil/prefix", "/allowed/prefix", "evil/allowed/prefix"),
    )
]
OUTSIDE += [
    ("https://allowed/prefix", "http://allowed/prefix"),
    ("s3://Bucket/prefix", "s3://bucket/prefix"),
    ("file:///srv/store", "local:///srv/store"),
    ("file:///srv/store", "file://srv/store"),
    ("file:///srv/store", "file://localhost/srv/store"),
    ("file:///", "file:///../x"),
]


@pytest.mark.parametrize(("allowed", "url"), OUTSIDE)
def test_no_address_leads_out_of_what_a_nodes_owner_allows(allowed: str, url: str) -> None:
    pytest.importorskip("fsspec")
    assert not is_below(url, allowed)
    with pytest.raises(UserError):
        check_store(url, allowed)


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("https://Allowed.Example/prefix", "https://allowed.example:443/prefix/run1"),
        ("http://host:80", "http://HOST/a/b"),
        ("memory://allowed/", "memory://allowed/run.1/a..b"),
        ("s3://bucket", "s3://bucket/folder/run1/"),
    ],
)
def test_addresses_of_one_place_are_equal(allowed: str, url: str) -> None:
    pytest.importorskip("fsspec")
    if wrong_url(url) is None:  # where the packages of its scheme are installed
        assert is_below(url, allowed)


def test_no_symbolic_link_leads_out_of_a_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    root, victim = tmp_path / "store", tmp_path / "victim"
    for folder in (root / "run1", victim):
        folder.mkdir(parents=True)
    (victim / "head.safetensors").write_bytes(b"secret")
    (root / "away").symlink_to(victim)
    (root / "near").symlink_to(root / "run1")
    assert not is_below(f"file://{root}/away", f"file://{root}")
    assert is_below(f"file://{root}/near", f"file://{root}")
    store = ObjectStore(f"file://{root}/run1")
    (root / "run1/step-00000001").symlink_to(victim)
    (root / "run1/step-00000002").mkdir()
    (root / "run1/step-00000002/head.safetensors.part").symlink_to(victim / "new")
    (root / "run1/run.json").symlink_to(victim / "head.safetensors")
    for reach in (
        lambda: store.put(1, "embed", b"x"),
        lambda: store.put(2, "head", b"x"),
        lambda: store.get(1, "head", 10),
        lambda: store.remove(1),
        lambda: store.hold((), "{}"),
        lambda: store.record(),
    ):
        with pytest.raises(RunError, match="leads out of"):
            reach()
    assert [path.name for path in victim.iterdir()] == ["head.safetensors"]
    assert (victim / "head.safetensors").read_bytes() == b"secret"
