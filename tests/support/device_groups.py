"""Several processes of one node that share a stage, and what they train on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from node.config.schema import RunConfig
from node.parallel.group import Leader
from node.parallel.processes import DeviceGroup

CPU = torch.device("cpu")


@contextmanager
def leading(config: RunConfig, ranks: int, tensor_parallel: int = 1) -> Iterator[Leader]:
    """A group of processes on CPUs, by its leader; ended on exit."""
    with closed_at_last(DeviceGroup((CPU,) * ranks, threads=1, tensor_parallel=tensor_parallel)) as group:
        yield group.start(config)
        group.close()


@contextmanager
def closed_at_last(group: DeviceGroup) -> Iterator[DeviceGroup]:
    """Whatever goes wrong meanwhile, no process is left; a test may close it before, in its own way."""
    try:
        yield group
    except BaseException:
        # In good order it would wait, beyond any limit of a test, for processes that wait elsewhere.
        group.close(broken=True)
        raise


def tokens(step: int, microbatch: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Four samples of 16 tokens below `vocab`, and their labels."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    rows = torch.randint(0, vocab, (4, 17), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
