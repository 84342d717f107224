"""Chunks: the same initial bits on any split, and the same bits chained as whole."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection
from node.model.chunk import Chunk, build_chunk, compute_precision
from node.model.units import parameter_specs, unit_names
from node.schedule.placement import split_units
from wire.errors import ConfigError

CPU = torch.device("cpu")
LLAMA = ModelSection(layers=5, hidden=48, heads=3, kv_heads=1, ffn=100, vocab=101, sequence=24)
GPT2 = ModelSection(family="gpt2", layers=5, hidden=48, heads=3, ffn=100, vocab=101, sequence=24, tied=True)
BOTH = pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2-tied"])


def whole(model: ModelSection, seed: int = 7) -> Chunk:
    return build_chunk(model, unit_names(model), seed, CPU)


def weights(chunks: list[Chunk]) -> dict[tuple[str, str], Tensor]:
    return {
        (unit, name): parameter
        for chunk in chunks
        for unit, parameters in chunk.named_units()
        for name, parameter in parameters.items()
    }


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@BOTH
@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_initial_weights_do_not_depend_on_the_split(model: ModelSection, chunks: int) -> None:
    split = [build_chunk(model, units, 7, CPU) for units in split_units(model, chunks)]
    expected = weights([whole(model)])
    built = weights(split)
    assert list(built) == list(expected)
    assert all(same_bits(built[key], expected[key]) for key in expected)


@BOTH
def test_initial_weights(model: ModelSection) -> None:
    chunk = whole(model)
    assert sum(p.numel() for p in chunk.parameters()) == sum(
        spec.elements for unit in unit_names(model) for spec in parameter_specs(model, unit)
    )
    block = chunk.unit_parameters("block.0002")
    assert torch.equal(block["ffn_norm.weight"], torch.ones(48))
    up, down = block["up.weight"], block["down.weight"]
    # 4800 draws: the sample's deviation is within 5 % of the true one by over four of its own.
    assert up.std().item() == pytest.approx(0.02, rel=0.05)
    assert down.std().item() == pytest.approx(0.02 / math.sqrt(10), rel=0.05)
    assert abs(up.mean().item()) < 5 * 0.02 / math.sqrt(4800)
    other = chunk.unit_parameters("block.0003")["up.weight"]
    assert not torch.equal(up, other)
    assert not torch.equal(up, whole(model, seed=8).unit_parameters("block.0002")["up.weight"])


def test_tied_copies_start_equal_and_apart() -> None:
    chunk = whole(GPT2)
    embed, head = chunk.tied_parameter("embed"), chunk.tied_parameter("head")
    assert embed is not None and head is not None
    assert torch.equal(embed, head)
    assert embed.data_ptr() != head.data_ptr()
    assert chunk.tied_parameter("block.0000") is None
    assert whole(LLAMA).tied_parameter("head") is None
    assert not torch.equal(
        whole(LLAMA).unit_parameters("embed")["tokens.weight"],
        whole(LLAMA).unit_parameters("head")["output.weight"],
    )


def test_building_does_not_use_torchs_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    whole(LLAMA)
    assert torch.equal(before, torch.get_rng_state())


@BOTH
@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_chained_chunks_give_the_bits_of_the_whole(model: ModelSection, chunks: int) -> None:
    """Forward and every gradient, with the tensors detached at each boundary as between processes."""
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, model.vocab, (2, model.sequence + 1)))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    one = whole(model)
    expected_loss = one.loss(tokens, labels)
    torch.autograd.backward(expected_loss)

    split = [build_chunk(model, units, 7, CPU) for units in split_units(model, chunks)]
    x = tokens
    sent, arrived = [], []
    for chunk in split[:-1]:
        out = chunk(x)
        assert out.shape == (2, model.sequence, model.hidden) and out.dtype == torch.float32
        x = out.detach().requires_grad_()
        sent.append(out)
        arrived.append(x)
    loss = split[-1].loss(x, labels)
    assert same_bits(loss, expected_loss)
    assert same_bits(split[-1](x), one(tokens))

    torch.autograd.backward(loss)
    for out, x in zip(reversed(sent), reversed(arrived), strict=True):
        torch.autograd.backward(out, x.grad)
    expected = weights([one])
    for key, parameter in weights(split).items():
        gradient, expected_gradient = parameter.grad, expected[key].grad
        assert gradient is not None and expected_gradient is not None
        assert same_bits(gradient, expected_gradient), key


@BOTH
def test_bfloat16_keeps_boundaries_loss_and_gradients_in_float32(model: ModelSection) -> None:
    first, last = (build_chunk(model, units, 7, CPU) for units in split_units(model, 2))
    tokens = torch.zeros(2, model.sequence, dtype=torch.int64)
    with compute_precision("bfloat16", CPU):
        hidden = first(tokens)
        loss = last.loss(hidden, tokens)
    assert hidden.dtype == torch.float32
    assert loss.dtype == torch.float32
    torch.autograd.backward(loss)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in first.parameters())
    with compute_precision("float32", CPU):
        exact = last.loss(first(tokens), tokens)
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


@pytest.mark.parametrize(
    "units",
    [(), ("tail",), ("block.0000", "block.0002"), ("block.0001", "block.0000"), ("head", "embed")],
)
def test_units_must_be_a_contiguous_run(units: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="not a contiguous run"):
        build_chunk(LLAMA, units, 0, CPU)


def test_unknown_precision() -> None:
    with pytest.raises(ConfigError, match="precision is 'float64'"):
        compute_precision("float64", CPU)
