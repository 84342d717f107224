"""Processes of one node that share a stage, ranks that run a script, and collectives for tests of memory."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from node.config.schema import RunConfig
from node.stage import collectives
from node.stage.group import Leader
from node.stage.processes import DeviceGroup
from tests.support.paths import python_path
from tests.support.process import Launch

CPU = torch.device("cpu")


@contextmanager
def leading(config: RunConfig, ranks: int, tensor_parallel: int = 1) -> Iterator[Leader]:
    """The leader of a group of processes on CPUs; they end on exit."""
    with closed_at_last(DeviceGroup((CPU,) * ranks, threads=1, tensor_parallel=tensor_parallel)) as group:
        yield group.start(config)
        group.close()


@contextmanager
def closed_at_last(group: DeviceGroup) -> Iterator[DeviceGroup]:
    """Close the group after an error; otherwise the test closes it."""
    try:
        yield group
    except BaseException:
        # An orderly close would wait for processes that wait for something else.
        group.close(broken=True)
        raise


def tokens(step: int, microbatch: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Four samples of 16 tokens below `vocab`, and their labels."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    rows = torch.randint(0, vocab, (4, 17), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---- ranks

RANK_SECONDS = 120


def run_ranks(script: str, ranks: int, folder: Path, launch: Launch) -> None:
    """Run `script` once a rank, in a gloo group, with FOLDER, RANK and RANKS defined.

    Raises AssertionError with a rank's output if it fails.
    """
    file = folder / "script.py"
    file.write_text(PROLOGUE + script, encoding="utf-8")
    outputs = [folder / f"rank-{rank}.txt" for rank in range(ranks)]
    workers = []
    try:
        for rank in range(ranks):
            environment = {
                **os.environ,
                "FOLDER": str(folder),
                "RANK": str(rank),
                "RANKS": str(ranks),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": python_path(),
                "PYTHONWARNINGS": "ignore",
            }
            with outputs[rank].open("wb") as output:
                workers.append(
                    launch(
                        [sys.executable, str(file)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        codes = [worker.wait(RANK_SECONDS) for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    for rank, code in enumerate(codes):
        assert code == 0, f"rank {rank} ended with {code}:\n{outputs[rank].read_text()}"


PROLOGUE = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER, RANK, RANKS = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["RANKS"])
dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", rank=RANK, world_size=RANKS)
"""


# ---- collectives

COLLECTIVES = ("all_to_all_single", "broadcast", "gather", "scatter")


def settle_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocking collectives return only once gloo has released the tensors.

    A worker thread of gloo drops its tensors some time after the call returns. If it is the last to hold one,
    the memory is freed on a thread that torch's profiler does not follow, and counts as taken for ever.
    """
    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, _settled(getattr(dist, name)))
    monkeypatch.setattr(collectives, "all_gather", _settled(collectives.all_gather))


def _settled(collective: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(*given: Any, **options: Any) -> Any:
        if options.get("async_op"):  # its buffers are kept
            return collective(*given, **options)
        tensors = [tensor for value in (*given, *options.values()) for tensor in _tensors(value)]
        before = [_holders(tensor) for tensor in tensors]
        # Gloo gets other tensors on the same storages, so the storages' counts show when it has dropped them.
        collective(*map(_alias, given), **{name: _alias(value) for name, value in options.items()})
        while any(_holders(tensor) > count for tensor, count in zip(tensors, before, strict=True)):
            pass
        return None

    return waiting


def _tensors(value: object) -> list[Tensor]:
    many = value if isinstance(value, list) else [value]
    return [tensor for tensor in many if isinstance(tensor, Tensor)]


def _alias(value: Any) -> Any:
    if isinstance(value, list):
        return [_alias(one) for one in value]
    return value.detach() if isinstance(value, Tensor) else value


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[no-any-return,attr-defined]
