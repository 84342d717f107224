"""What waits in host memory comes back with the same bits, in time, and no more of it than two blocks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection, RunConfig
from node.model import offload
from node.model.host_memory import CudaHostMemory
from node.stage.stage_model import StageModel
from node.tuning.memory_plan import Choice
from node.tuning.state_moves import STAYS, Moved
from tests.support.host_memory import LateHostMemory
from tests.support.passes import CASES, Forced

CPU = torch.device("cpu")
SHAPE = (2, 16)
HIDDEN = 64
ALL = Choice(moved=(offload.ALL,))
ORDERS = {
    "two in flight": ("f0", "f1", "b0", "f2", "b1", "b2"),
    "one at a time": ("f0", "b0", "f1", "b1"),
    "last in, first out": ("f0", "f1", "f2", "b2", "b1", "b0"),
}


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)


def config(case: str, **model: object) -> RunConfig:
    training, storage, lora = CASES[case]
    sizes = ModelSection(layers=6, hidden=HIDDEN, heads=2, kv_heads=2, ffn=96, vocab=101, sequence=SHAPE[1])
    return RunConfig(model=replace(sizes, **model), training=training, storage=storage, lora=lora)


def steps(
    run: RunConfig,
    choices: tuple[Choice, ...],
    host: LateHostMemory | None = None,
    *,
    stage: int = 1,
    order: str = "two in flight",
    count: int = 2,
    states: Sequence[Moved] = (STAYS,),
) -> list[Tensor]:
    """All that two steps give to others, and the stage's state after them.

    `states`: what is in host memory in the first step, and in those after it, again from the begin.
    """
    model = StageModel(run, CPU, room=Forced(choices, states[0]), host=host)
    model.build(stage, 2)
    found: list[Tensor] = []
    for step in range(count):
        control = model._control
        assert control is not None
        control.plan = replace(control.plan, state=states[step % len(states)])
        model.begin_step()
        for action in ORDERS[order]:
            microbatch = int(action[1])
            random = torch.Generator().manual_seed(10 * step + microbatch)
            tokens = torch.randint(0, run.model.vocab, SHAPE, generator=random)
            hidden = torch.randn(*SHAPE, HIDDEN, generator=random)
            if action[0] == "f":
                made = model.forward(0, microbatch, hidden if stage else tokens, tokens if stage else None)
            else:
                made = model.backward(0, microbatch, None if stage else hidden)
            found += [] if made is None else [made]
        model.finish_step()
        found.append(torch.tensor(list(model.squared_norms().values())))
        model.apply(1e-2, 0.5)
    return found + [tensor for unit in model.optimizer.units for tensor in model.unit_state(unit).values()]


@cache
def all_moved(case: str) -> tuple[list[Tensor], int]:
    """What the steps of a case give where nothing moves, and the bytes that move where everything does."""
    host, wanted = LateHostMemory(), steps(config(case), KEPT3)
    assert same(steps(config(case), (ALL,) * 3, host), wanted)
    return wanted, host.copied_out


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


KEPT3 = (Choice.KEPT,) * 3


@pytest.mark.parametrize(
    ("case", "stage"),
    [
        ("float32", 0),
        ("autocast", 1),
        ("fp8", 0),
        *(("agoq", stage) for stage in (0, 1)),
        ("compact", 0),
        ("recompute", 1),
        ("products in fp8, agoq, bf16", 1),
        *(("lora", stage) for stage in (0, 1)),
        ("lora, 4 bits, dropout", 1),
    ],
)
def test_moved_activations_come_back_with_the_same_bits(case: str, stage: int) -> None:
    """On the last stage everything moves, on the first only some of it."""
    run = config(case)
    again = Choice.KEPT if run.lora.dropout else replace(Choice.AGAIN, moved=(offload.ALL,))
    choices = (ALL, ALL, ALL) if stage else (again, ALL, Choice.KEPT)
    host = LateHostMemory()
    assert same(steps(run, choices, host, stage=stage), steps(run, KEPT3, stage=stage))
    assert host.copied_out > 0


@pytest.mark.parametrize(("order", "family"), list(zip(ORDERS, ("llama", "gpt2", "llama"), strict=True)))
def test_any_order_of_microbatches_and_a_tied_head_in_pieces(
    order: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.model.storage.HEAD_LOGITS", 500)
    run = config("autocast", family=family)
    assert same(steps(run, (ALL,) * 3, LateHostMemory(), order=order), steps(run, KEPT3, order=order))


@pytest.mark.parametrize("kind", ["norm_input", "attention", "attention_output", "ffn_input"])
@pytest.mark.parametrize("case", ["agoq", "compact"])
def test_one_kind_moves_alone(case: str, kind: str) -> None:
    host, (wanted, everything) = LateHostMemory(), all_moved(case)
    assert same(steps(config(case), (Choice(moved=(kind,)),) * 3, host), wanted)
    assert 0 < host.copied_out < everything


def test_the_device_holds_two_moved_blocks_at_most_and_host_memory_is_used_again() -> None:
    run = config("agoq", layers=16)
    host = LateHostMemory()
    steps(run, (ALL,) * 8, host, count=1)
    blocks = host.copied_out / (3 * 8)  # three microbatches
    assert 0 < host.most_on_device <= 2 * blocks
    # Two microbatches in flight; nothing new in later steps.
    most = host.most_lent_bytes
    assert most <= 2 * 8 * blocks
    assert host.lent_bytes == 0
    later = LateHostMemory()
    steps(run, (ALL,) * 8, later, count=3)
    assert later.most_lent_bytes == most


def test_a_step_that_is_dropped_leaves_nothing_behind() -> None:
    run, host = config("agoq"), LateHostMemory()
    model = StageModel(run, CPU, room=Forced((ALL,) * 3), host=host)
    model.build(0, 2)
    model.begin_step()
    tokens = torch.zeros(SHAPE, dtype=torch.int64)
    for microbatch in range(2):
        model.forward(0, microbatch, tokens)
    assert host.lent_bytes > 0
    model.begin_step()
    assert host.lent_bytes == 0


class _Recorder:
    """Stands for `torch.cuda`: one line for each thing a stream is told to do."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0
        self.current = _Stream("compute", self.lines)

    def Stream(self, device: torch.device) -> "_Stream":
        self.count += 1
        return _Stream(("out", "in")[self.count - 1], self.lines)

    def Event(self) -> "_Event":
        return _Event(self.lines)

    def stream(self, stream: "_Stream") -> "_Stream":
        return stream

    def current_stream(self, device: torch.device) -> "_Stream":
        return self.current


class _Stream:
    def __init__(self, name: str, lines: list[str]) -> None:
        self.name = name
        self.lines = lines

    def wait_stream(self, other: "_Stream") -> None:
        self.lines.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "_Event") -> None:
        self.lines.append(f"{self.name} waits for a mark of {event.stream}")

    def __enter__(self) -> None:
        self.lines.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        pass


class _Event:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.stream = ""

    def record(self, stream: _Stream) -> None:
        self.stream = stream.name
        self.lines.append(f"{stream.name} is marked")


def test_copies_wait_for_the_work_before_them_and_go_on_streams_of_their_own() -> None:
    streams = _Recorder()
    memory = CudaHostMemory(CPU, streams, page_locked=False)
    device, host = torch.arange(4.0), torch.zeros(4)
    mark = memory.copy_out([(device, host)])
    memory.wait(mark)
    back = torch.zeros(4)
    memory.wait(memory.copy_in([(host, back)]))
    assert torch.equal(back, device)
    assert streams.lines == [
        "out waits for compute",
        "on out",
        "out is marked",
        "compute waits for a mark of out",
        "in waits for compute",
        "on in",
        "in is marked",
        "compute waits for a mark of in",
    ]
