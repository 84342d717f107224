"""Shared by all tests: one thread for torch, so that arithmetic order is predictable on few cores; a process
from which others are forked; and one for Triton's interpreter."""

import gc
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

from node.parallel import processes
from tests.support.examples import FUZZ, examples
from tests.support.fault_prefork import Prefork
from tests.support.interpreter import HAS_TRITON, INTERPRETED, Interpreted, sure_of_sums

torch.set_num_threads(1)
if INTERPRETED:
    sure_of_sums()

# A busy machine is slow at times, in making examples too: how long a test may take, pytest-timeout says.
settings.register_profile(
    "thinwire",
    deadline=None,
    derandomize=not FUZZ,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("thinwire")


TEMPLATE = pytest.StashKey[Prefork]()
INTERPRETER = pytest.StashKey[tuple[Interpreted, tempfile.TemporaryDirectory[str]]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what works beside the tests, if any test asks for it: the process that others are forked from,
    which has much to import, and Triton's interpreter with its tests."""
    if session.config.option.collectonly:
        return
    # What is imported stays: no collection needs to look at it again.
    gc.freeze()
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    if any("prefork" in item.fixturenames for item in items):
        session.config.stash[TEMPLATE] = Prefork().__enter__()
    asked = {item.path for item in items if "interpreted" in item.fixturenames}
    if asked and HAS_TRITON and not INTERPRETED:
        folder = tempfile.TemporaryDirectory()
        session.config.stash[INTERPRETER] = Interpreted(sorted(asked), Path(folder.name)), folder


def pytest_unconfigure(config: pytest.Config) -> None:
    if (template := config.stash.get(TEMPLATE, None)) is not None:
        template.__exit__(None, None, None)
    if (interpreter := config.stash.get(INTERPRETER, None)) is not None:
        interpreted, folder = interpreter
        interpreted.end()
        folder.cleanup()


@pytest.fixture(scope="session")
def prefork(request: pytest.FixtureRequest) -> Prefork:
    """A process that has imported everything, from which others are forked."""
    return request.config.stash[TEMPLATE]


@pytest.fixture
def forked_workers(prefork: Prefork, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a node's other devices are forked too; `test_run_devices.py` starts them for real."""
    names = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=prefork.popen, **names))


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest) -> Interpreted:
    """A process for Triton's interpreter, for all files of the session that ask for it."""
    return request.config.stash[INTERPRETER][0]


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the user's own state directory, and relative paths in a fresh folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
