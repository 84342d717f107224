"""A GPU's state is read beside its work, and is that of its step."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from node.stage import state_copy
from node.stage.state_copy import StateCopy, read_layer
from node.state.serialization import serialize_unit
from node.training.optimizer import StateTensor

UNITS = ("embed", "block.0000", "block.0001", "head")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["between steps", "on another thread"])
@pytest.mark.parametrize("patience", [0.0, 20.0])
def test_a_state_that_changes_as_soon_as_it_may_is_read_as_it_was(
    patience: float, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_copy, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(state_copy, "SLICE", 1 << 20)
    saved = {"parameter.weight": torch.float32, "exp_avg.weight": torch.float32}
    tensors = {
        unit: {
            "parameter.weight": torch.randn(1 << 22, device="cuda").bfloat16(),
            "exp_avg.weight": torch.randn(1 << 22, device="cuda"),
        }
        for unit in UNITS
    }
    # Work that is under way when the copy is made belongs to its step.
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        slow = (slow @ slow).tanh()
    for unit in UNITS:
        for one in tensors[unit].values():
            one.add_(slow.flatten()[: one.numel()].to(one.dtype))

    def begin() -> StateCopy:
        return StateCopy(
            (unit, {name: StateTensor(one, saved[name]) for name, one in tensors[unit].items()})
            for unit in UNITS
        )

    with ThreadPoolExecutor(1) as other:
        state = other.submit(begin).result() if elsewhere else begin()
    torch.cuda.synchronize()
    expected = {
        unit: serialize_unit({name: one.to("cpu", saved[name]) for name, one in tensors[unit].items()})
        for unit in UNITS
    }
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read_layer, state, unit, None, 0) for unit in UNITS]
        state.settle(patience)
        for unit in UNITS:
            for one in tensors[unit].values():
                one.zero_()
        layers = [one.result() for one in reading]
    for unit, layer in zip(UNITS, layers, strict=True):
        assert layer.file.read(0, layer.file.size) == expected[unit]
