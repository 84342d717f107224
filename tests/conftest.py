"""Setup of all tests: torch's threads, Ctrl-C, Hypothesis's profile, and fixtures that a session shares."""

import gc
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from node.parallel import processes
from tests.support.cases import seed
from tests.support.examples import FUZZ, examples
from tests.support.fault_prefork import Prefork
from tests.support.interpreter import INTERPRETED, Interpreted, accept_loop_bounds, skip_overflow_checks

# The order of sums must not depend on the number of cores.
torch.set_num_threads(1)
if INTERPRETED:
    skip_overflow_checks()
    accept_loop_bounds()

LONGEST = (
    *("interpreter", "test_lab_reach.py", "test_lab_run.py", "test_lab_network.py", "test_attacks.py"),
    *("test_attacks_silence.py", "test_run_rows.py", "test_run_resume.py", "test_cli_demo_run.py"),
    *("test_deploy_commands.py", "test_sieges.py", "test_fault_matrix.py"),
)
"""The longest files, longest first: begun late, one of them would run alone at the end."""

# No deadline for an example: a busy machine is slow at times, and pytest-timeout bounds each test.
settings.register_profile(
    "thinwire",
    deadline=None,
    derandomize=not FUZZ,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("thinwire")
if not FUZZ:
    # Hypothesis draws constants of the modules that happen to be imported: a test's examples would depend on
    # the tests before it on the same worker.
    vars(providers)["is_local_module_file"] = lambda path: False


def pytest_configure() -> None:
    """Restore SIGINT: under `make test &` it is ignored, and processes that tests start inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each file's tests on one worker, and all `_interpreter.py` files on one: they share fixtures.

    Tests in `integration` mostly wait for processes, the others compute. The first worker takes the others as
    long as there are any, so that both cores of a small machine have work from beginning to end.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "interpreter" if file.endswith("_interpreter.py") else file

        def _assign_work_unit(self, node: Any) -> None:
            computes = node is min(self.nodes, key=lambda worker: str(worker.gateway.id))
            scope = min(self.workqueue, key=lambda scope: _turn(scope, computes=computes))
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


def _turn(scope: str, *, computes: bool) -> tuple[bool, int]:
    """By this a worker chooses among the files that are left: the least, and the first of equals."""
    waits, name = "/integration/" in scope, scope.rpartition("/")[2]
    return waits == computes, (*LONGEST, name).index(name)


class _Turned(pytest.Dir):
    """A folder of which each worker collects another part first.

    On a fresh clone each then finds compiled what another has imported; in one order, all of them would
    compile the same modules at the same time.
    """

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        found, worker = list(super().collect()), vars(self.config)["workerinput"]
        first = len(found) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        yield from (*found[first:], *found[:first])


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not hasattr(parent.config, "workerinput"):
        return None
    folder: _Turned = _Turned.from_parent(parent, path=path)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The order of all workers, and of a run without any: that of paths.
    items.sort(key=lambda item: item.path.parts)


def pytest_collectstart() -> None:
    # Modules and tests are made and kept: there is no garbage to look for.
    gc.disable()


def pytest_collection_finish() -> None:
    # Keep the garbage collector from scanning the imported modules again.
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random tensors in each test, whichever tests ran before it in the process."""
    seed()


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
    files = {item.path for item in items if "interpreted" in item.fixturenames}
    process = Interpreted(sorted(files), tmp_path_factory.mktemp("interpreter"))
    yield process
    process.end()


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests out of the user's state directory; relative paths are in a fresh folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
