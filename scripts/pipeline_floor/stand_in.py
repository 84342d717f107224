"""A node whose blocks take a set time and compute nothing, in a process of its own."""

import os
import time
from pathlib import Path
from typing import Any

import torch

NODE = "node"
"""The script's first argument when it is to be a node."""
TIMES = "THINWIRE_STAND_IN_SECONDS"
"""The environment's variable with the seconds of a block, forward and backward."""


def node(token: str, listen: str, advertise: str, directory: str) -> int:
    """`thinwire join` with blocks that take a set time and compute nothing."""
    from node.config.join_options import JoinOptions
    from node.model import blocks
    from node.processes.node import run_node

    forward, backward = map(float, os.environ[TIMES].split())
    blocks.LlamaBlock.forward = _block_forward(forward, backward)  # type: ignore[method-assign]
    blocks.Head.forward = _head_forward  # type: ignore[method-assign]
    options = JoinOptions(
        listen=listen, advertise=advertise, state_dir=Path(directory), device="cpu", threads=1, json=True
    )
    return run_node(token, options)


class _Paced(torch.autograd.Function):
    """The identity, which takes a set time each way and gives its parameters gradients of zero."""

    @staticmethod
    def forward(ctx: Any, seconds: tuple[float, float], x: torch.Tensor, *weights: torch.Tensor) -> Any:
        until = time.perf_counter() + seconds[0]
        ctx.seconds = seconds[1]
        ctx.shapes = [weight.shape for weight in weights]
        result = x.clone()
        _sleep_until(until)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        until = time.perf_counter() + ctx.seconds
        zeros = tuple(torch.zeros(shape) for shape in ctx.shapes)
        _sleep_until(until)
        return None, gradient, *zeros


def _sleep_until(moment: float) -> None:
    if (pause := moment - time.perf_counter()) > 0:
        time.sleep(pause)


def _block_forward(forward: float, backward: float) -> Any:
    def run(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Paced.apply((forward, backward), x, *block.parameters())
        return result

    return run


def _head_forward(head: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Paced.apply((0.0, 0.0), x, *head.parameters())
    return result[..., :256]
