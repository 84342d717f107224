"""What runs again in backward: how far, with what, and how long its tensors live."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from node.model.recompute import recomputed


class Block:
    """Two products and a sum, which saves nothing; records what it ran."""

    def __init__(self) -> None:
        self.weights = [torch.randn(6, 6, requires_grad=True) for _ in range(2)]
        self.ran: list[str] = []
        self.made: list[weakref.ref[Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.ran.append("first")
        inner = (x @ self.weights[0]).relu()
        self.made.append(weakref.ref(inner))
        outer = inner @ self.weights[1]
        self.ran.append("last")
        return outer + x

    def gradients(self, x: Tensor) -> list[Tensor]:
        found = [weight.grad for weight in (*self.weights, x) if weight.grad is not None]
        for weight in (*self.weights, x):
            weight.grad = None
        return found


@pytest.mark.parametrize("learns", [True, False], ids=["input-learns", "input-does-not"])
def test_the_bits_are_those_of_autograd_in_every_backward(learns: bool) -> None:
    block = Block()
    x = torch.randn(3, 6, requires_grad=learns)
    block(x).square().sum().backward()
    wanted = block.gradients(x)
    assert len(wanted) == 2 + learns
    made = recomputed(block, x).square().sum()
    for _ in range(2):
        made.backward(retain_graph=True)
        assert all(map(torch.equal, block.gradients(x), wanted))
    # Plainly, forward, and again up to what the second product saves, twice.
    assert block.ran == ["first", "last"] * 2 + ["first"] * 2


def test_nothing_but_the_input_is_kept_and_hooks_see_it() -> None:
    block, kept = Block(), []
    x = torch.randn(3, 6, requires_grad=True)

    def pack(tensor: Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    with saved_tensors_hooks(pack, kept.__getitem__):
        made = recomputed(block, x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    assert block.made[0]() is None
    made.sum().backward()
    # Each tensor of the second run goes with the part of backward that uses it.
    assert [reference() for reference in block.made] == [None, None]


def test_it_runs_again_under_the_autocast_of_then() -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    weight = torch.randn(6, 6, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        made = x @ weight
        seen.append((torch.is_autocast_enabled("cpu"), made.dtype))
        return made.float().exp()

    with torch.autocast("cpu", torch.bfloat16):
        made = recomputed(run, torch.randn(3, 6))
    made.sum().backward()
    assert seen == [(True, torch.bfloat16)] * 2


def test_without_gradients_it_runs_once() -> None:
    block = Block()
    with torch.no_grad():
        recomputed(block, torch.randn(3, 6))
    assert block.ran == ["first", "last"]


@pytest.mark.parametrize("second", ["fewer", "another-shape"])
def test_a_function_that_saves_something_else_is_told_of(second: str) -> None:
    runs = []

    def run(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 2:
            x = x[:1] if second == "another-shape" else x.detach()
        return (x.exp() * 2.0).exp()

    made = recomputed(run, torch.randn(3, 6, requires_grad=True))
    with pytest.raises(RuntimeError, match="runs again in backward saved"):
        made.sum().backward()
