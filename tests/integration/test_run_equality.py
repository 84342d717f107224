"""Runs of real processes give the unsplit trainer's losses and weights, bit for bit.

The coordinator and a node of one run start from nothing; other processes are forked.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Run

PLAIN = replace(SMALL, run=replace(SMALL.run, steps=10))


@pytest.mark.timeout(240)
def test_a_run_is_the_unsplit_model(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, PLAIN, launch=prefork.popen) as run:
        coordinator = run.start(wrapper=("env",))  # what is wrapped is not forked
        nodes = [run.add_node(wrapper=("env",)), *run.add_nodes(3)]
        assert coordinator.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [0] * len(nodes)
        run.assert_undisturbed()
        assert run.snapshots == [PLAIN.run.steps]


TRAINS = """
import sys
import torch
from node.model.chunk import build_chunk
from node.model.storage import Storage
from node.stage.passes import AutogradPasses
from tests.support.memory_pipeline import reference_run
from tests.support.run_harness import SMALL, packed

reference_run(SMALL, 2)
reference_run(packed(SMALL), 1)
again = build_chunk(SMALL.model, ["block.0000"], 1, torch.device("cpu"), storage=Storage(again=True))
again(torch.randn(2, 4, SMALL.model.hidden, requires_grad=True)).sum().backward()
fed, given = torch.ones(2, 3), torch.randn(2, 3)
passes = AutogradPasses(lambda fed, *_: fed.exp(), "float32", fed.device, 1)
passes.forward(0, fed, None)
assert torch.equal(passes.backward(0, given), given * fed.exp())
print(sorted({"torch._dynamo", "sympy"} & sys.modules.keys()))
"""


def test_training_imports_nothing_that_takes_long(prefork: Prefork, tmp_path: Path) -> None:
    """Torch's compiler takes seconds, sympy a part of one, and nodes would wait for them.
    Activations that are stored packed or computed again need none of them either, nor do codecs."""
    (tmp_path / "trains.py").write_text(TRAINS)
    command = [sys.executable, str(tmp_path / "trains.py")]
    process = prefork.popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.read() == "[]\n"
    assert process.wait(150) == 0
