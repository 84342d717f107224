"""A run's database where it may only be read: on read-only media, or as another user."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

from node.coordinator.store import DATABASE_FILE, Store
from wire.errors import RunError, UserError

NOW = 1_800_000_000.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a run that ended. Its name is one that a URI would take for its own signs."""
    directory = tmp_path / "a run? #1 %41"
    with Store.create(directory, run_id="run-a", config_json='{"a": {}}', pin=bytes(32), now=NOW) as store:
        store.set_addresses(["127.0.0.1:7700"])
    return directory


@pytest.fixture
def read_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`directory` is, as `access` has it there; tests run as root, who may write whatever permissions say."""
    real = os.access
    monkeypatch.setattr(
        "node.coordinator.database.os.access",
        lambda path, mode: mode != os.W_OK and real(path, mode),
    )


@pytest.mark.usefixtures("read_only")
def test_a_run_that_ended_is_read_and_leaves_no_file_beside_it(directory: Path) -> None:
    before = sorted(path.name for path in directory.iterdir())
    with Store.open(directory) as store:
        assert store.run().run_id == "run-a"
        with pytest.raises(RunError, match="read-only"):
            store.create_token(NOW, timedelta(hours=1), 1)
        with pytest.raises(RunError, match="cannot be changed"):
            store.set_addresses(["127.0.0.1:7700"])
        assert sorted(path.name for path in directory.iterdir()) == before


def test_a_run_that_goes_on_is_read_as_it_is_now(directory: Path, request: pytest.FixtureRequest) -> None:
    with Store.open(directory) as writer:
        writer.set_addresses(["127.0.0.1:7701"])
        assert directory.joinpath(f"{DATABASE_FILE}-wal").exists()
        request.getfixturevalue("read_only")
        with Store.open(directory) as store:
            assert store.run().addresses == ("127.0.0.1:7701",)
            writer.set_addresses(["127.0.0.1:7702"])
            assert store.run().addresses == ("127.0.0.1:7702",)


@pytest.mark.usefixtures("read_only")
def test_a_file_that_is_not_a_database_is_refused_there_too(directory: Path) -> None:
    (directory / DATABASE_FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="is not a run's database"):
        Store.open(directory)
