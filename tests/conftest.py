"""Shared by all tests: one thread for torch, so that arithmetic order is predictable on few cores; a process
from which others are forked; and one for Triton's interpreter."""

import subprocess
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

from node.parallel import processes
from tests.support.examples import FUZZ, examples
from tests.support.fault_prefork import Prefork
from tests.support.interpreter import INTERPRETED, Interpreted, sure_of_sums

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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the process that others are forked from, if any test asks for it; it imports beside the tests."""
    if session.config.option.collectonly:
        return
    if any("prefork" in item.fixturenames for item in session.items if isinstance(item, pytest.Function)):
        session.config.stash[TEMPLATE] = Prefork().__enter__()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (template := config.stash.get(TEMPLATE, None)) is not None:
        template.__exit__(None, None, None)


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
def interpreted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    """A process for Triton's interpreter, for all files of the session that ask for it."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    asked = {item.path for item in items if "interpreted" in item.fixturenames}
    return Interpreted(sorted(asked), tmp_path_factory.mktemp("interpreted") / "report.xml")
