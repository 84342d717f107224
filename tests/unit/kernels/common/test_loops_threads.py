"""How loops share their ranges between threads that are kept."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from kernels.common import loops
from tests.support.fault_prefork import Prefork

SECONDS = 60.0


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_two_threads_work_at_once_and_every_range_is_taken() -> None:
    both, taken = threading.Barrier(2, timeout=SECONDS), []

    def work(first: int, last: int) -> None:
        if first < 2:
            both.wait()
        taken.append((first, last, threading.get_ident()))

    loops.run(work, [(n, n + 1) for n in range(9)])
    assert sorted(part[:2] for part in taken) == [(n, n + 1) for n in range(9)]
    assert len({thread for *_, thread in taken}) == 2


@pytest.mark.parametrize("own", [True, False])
def test_an_error_comes_back_from_whichever_thread_and_after_all_have_ended(own: bool) -> None:
    both, ended = threading.Barrier(2, timeout=SECONDS), []
    caller = threading.get_ident()

    def work(first: int, last: int) -> None:
        both.wait()
        if (threading.get_ident() == caller) is own:
            raise ValueError("spoilt")
        ended.append(first)

    with pytest.raises(ValueError, match="spoilt"):
        loops.run(work, [(0, 1), (1, 2)])
    assert len(ended) == 1


def test_a_caller_does_not_wait_for_another_ones_work() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(first: int, last: int) -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    other = threading.Thread(target=loops.run, args=(slow, [(0, 1), (1, 2)]))
    other.start()
    try:
        assert begun.wait(SECONDS)
        taken: list[int] = []
        loops.run(lambda first, last: taken.append(first), [(n, n + 1) for n in range(5)])
        assert sorted(taken) == list(range(5))
    finally:
        go_on.set()
        other.join(SECONDS)
    assert not other.is_alive()


FORKS = """
import os, sys, threading, torch, warnings
from kernels.common import loops
torch.get_num_threads = lambda: 2
both = threading.Barrier(2, timeout=60)
loops.run(lambda first, last: both.wait(), [(0, 1), (1, 2)])
warnings.simplefilter("ignore")  # Python warns of a fork beside threads, which is what this is about
if (child := os.fork()) == 0:
    again = threading.Barrier(2, timeout=60)
    loops.run(lambda first, last: again.wait(), [(0, 1), (1, 2)])
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_threads_of_its_own(prefork: Prefork, tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    assert prefork.popen((sys.executable, str(tmp_path / "forks.py")), text=True).wait(120) == 7
