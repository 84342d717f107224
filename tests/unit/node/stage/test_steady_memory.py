"""Steps after the second take no memory that the second had not: what torch allocates on a CPU, counted."""

from dataclasses import replace

import pytest
import torch

from node.model import offload
from node.stage.stage_model import StageModel
from node.tuning.memory_plan import Choice
from node.tuning.state_moves import STAYS, Moved
from tests.support.memory_meter import by_step
from tests.support.passes import Forced
from tests.support.stored_runs import CPU, FORMS, run

MOVED = Choice(moved=(offload.ALL,))
CHOICES = {
    "kept": (Choice.KEPT, Choice.KEPT),
    "again": (Choice.AGAIN, Choice.AGAIN),
    "moved": (MOVED, MOVED),
}
STATES = {"kept": STAYS, "again": STAYS, "moved": Moved(moments=1)}


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("plain", "kept"),
        ("autocast", "again"),
        ("agoq", "moved"),
        ("agoq, fp8, bf16", "kept"),
    ],
)
def test_no_step_after_the_second_takes_more(form: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    assert form in FORMS
    config = run(form)
    small = replace(config.model, hidden=64, ffn=96, vocab=101, sequence=16)
    config = replace(config, model=small)
    model = StageModel(config, CPU, room=Forced(CHOICES[way], STATES[way]))
    model.build(0, 2)
    shape = (config.training.microbatch, config.model.sequence)
    above = torch.randn(*shape, config.model.hidden)

    def step() -> None:
        model.begin_step()
        for action in ("f0", "f1", "b0", "b1"):
            if action[0] == "f":
                model.forward(0, int(action[1]), torch.zeros(shape, dtype=torch.int64))
            else:
                model.backward(0, int(action[1]), above)
        model.finish_step()
        model.squared_norms()
        model.apply(1e-3, 1.0)

    step(), step()
    third, *others = by_step(3, step)
    for other in others:
        assert other.now == third.now
        assert other.most - other.now == others[0].most - others[0].now > 0
