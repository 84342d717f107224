"""Shared by all tests: one thread for torch, so that arithmetic order is predictable on few cores; and a
process from which others are forked."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

from node.parallel import processes
from tests.support.fault_prefork import Prefork

torch.set_num_threads(1)

# A busy machine is slow at times: how long a test may take is pytest-timeout's to say.
settings.register_profile("thinwire", deadline=None)
settings.load_profile("thinwire")


@pytest.fixture(scope="session")
def prefork() -> Iterator[Prefork]:
    """A process that has imported everything, from which others are forked."""
    with Prefork() as template:
        yield template


@pytest.fixture
def forked_workers(prefork: Prefork, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a node's other devices are forked too; `test_run_devices.py` starts them for real."""
    names = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=prefork.popen, **names))
