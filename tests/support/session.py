"""What tests share: threads of torch, Hypothesis's profile, fixtures of a session. A plugin of pytest."""

import gc
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from node.processes import coordinator
from node.stage import processes
from tests.support.cases import seed
from tests.support.examples import FUZZ, examples
from tests.support.fault_prefork import Prefork
from tests.support.interpreter import INTERPRETED, Interpreted, accept_loop_bounds, skip_overflow_checks

# The order of sums must not depend on the number of cores.
torch.set_num_threads(1)
# A coordinator in a test's process would look for cycles among all modules and tests, and let later
# collections look at them again: half a second each time. Processes of their own have it.
vars(coordinator)["rare_full_collections"] = nullcontext
if INTERPRETED:
    skip_overflow_checks()
    accept_loop_bounds()

# No deadline for an example: a busy machine is slow at times, and pytest-timeout bounds each test.
settings.register_profile(
    "thinwire",
    deadline=None,
    derandomize=not FUZZ,
    max_examples=examples(50),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("thinwire")
if not FUZZ:
    # Hypothesis draws constants of the modules that happen to be imported: a test's examples would depend on
    # the tests before it on the same worker.
    vars(providers)["is_local_module_file"] = lambda path: False


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random tensors in each test, whichever tests ran before it in the process."""
    seed()


@pytest.fixture
def frozen_again() -> Iterator[None]:
    """After a test that lets collections see what conftest.py excludes."""
    yield
    gc.freeze()


@pytest.fixture(scope="session")
def prefork() -> Iterator[Prefork]:
    """A process that has imported everything, from which others are forked."""
    with Prefork() as template:
        yield template


@pytest.fixture
def forked_workers(prefork: Prefork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of a node's other devices too; `test_run_devices.py` starts them for real."""
    names = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=prefork.popen, **names))


@pytest.fixture(scope="session")
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Interpreted]:
    """A process under Triton's interpreter for all files of the session that use it."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    files = {item.callspec.params["file"] for item in items if "interpreted" in item.fixturenames}
    process = Interpreted(sorted(files), tmp_path_factory.mktemp("interpreter"))
    yield process
    process.end()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch's, which else are one."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests out of the user's state directory; relative paths are in a fresh folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
