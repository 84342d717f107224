"""What pytest and its workers do: Ctrl-C, which worker takes which files, in which order they are collected.

What tests themselves share is in `tests.support.session`.
"""

import gc
import os
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from node.cli.importing import importing

# Here and in all that tests start: threads that wait for their next part of a product spin, on cores that
# others need. This stands before anything imports torch.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

ROOT = Path(__file__).resolve().parents[1]
LONGEST = (
    *("interpreter", "transformers", "test_lab_reach.py", "test_attacks.py", "test_run_rows.py"),
    *("test_fault_matrix.py", "test_run_reach.py", "test_lab_run.py", "test_run_devices.py"),
    *("test_deploy_commands.py", "test_readme_walk.py", "test_sieges.py", "test_lab_network.py"),
    *("test_run_resume.py", "test_fault_coordinator.py", "test_run_places.py", "test_cli_demo_run.py"),
)
"""The longest files, longest first: begun late, one of them would run alone at the end."""
IMPORTS_TRANSFORMERS = re.compile(r"(import|from) transformers|tests\.support\.(families|huggingface)")
"""Found in a test file that imports transformers, by itself or by what tests share."""


def pytest_configure(config: pytest.Config) -> None:
    # Under `make test &` SIGINT is ignored, and processes that tests start inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options = config.option
    workers = getattr(options, "numprocesses", None) and not options.collectonly
    if not workers or hasattr(config, "workerinput"):
        # Importing torch takes seconds. A process that leaves tests to workers does without it.
        with importing():
            config.pluginmanager.import_plugin("tests.support.session")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each file's tests on one worker.

    All `_interpreter.py` files share a worker, as they share fixtures. So do those that import transformers,
    which takes seconds.

    Tests in `integration` mostly wait for processes, the others compute. The first worker takes the others as
    long as there are any, so that both cores of a small machine have work from beginning to end.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(super()._split_scope(nodeid))

        def _assign_work_unit(self, node: Any) -> None:
            computes = node is min(self.nodes, key=lambda worker: str(worker.gateway.id))
            scope = min(self.workqueue, key=lambda scope: _turn(scope, computes=computes))
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


@cache
def _scope(file: str) -> str:
    """What runs together with a file's tests."""
    if file.endswith("_interpreter.py"):
        return "interpreter"
    text = "" if "/integration/" in file else (ROOT / file).read_text(encoding="utf-8")
    return "transformers" if IMPORTS_TRANSFORMERS.search(text) else file


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of workers that run no GPU test, the first alone reads them, to see that they can be imported."""
    worker = vars(config).get("workerinput", {}).get("workerid", "gw0")
    gpu = collection_path.name == "gpu" and config.option.markexpr == "not gpu"
    return True if gpu and worker != "gw0" else None


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
