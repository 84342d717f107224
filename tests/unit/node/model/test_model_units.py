"""Layer units, their parameters and costs, and how they are split into chunks."""

import math
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from node.config.schema import ModelSection
from node.model.chunk import Chunk, build_chunk, compute_precision
from node.model.rng import generator
from node.model.slices import GRANULE, sample_slices
from node.model.units import parameter_specs, tied_parameter, unit_cost, unit_names, unit_parameters
from node.schedule.placement import split_units
from wire.errors import ConfigError

LLAMA = ModelSection(layers=6, hidden=64, heads=4, kv_heads=2, ffn=172, vocab=256, sequence=32)
GPT2 = ModelSection(family="gpt2", layers=6, hidden=64, heads=4, ffn=256, vocab=256, sequence=32)


def test_units_are_named_in_order() -> None:
    assert unit_names(ModelSection(layers=2)) == ("embed", "block.0000", "block.0001", "head")


def test_parameter_counts() -> None:
    assert unit_parameters(LLAMA, "embed") == 256 * 64
    assert unit_parameters(LLAMA, "block.0003") == 2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 172
    assert unit_parameters(LLAMA, "head") == 64 + 256 * 64
    # GPT-2 small, whose count is well known: 124,439,808 with the head tied.
    small = ModelSection(
        family="gpt2", layers=12, hidden=768, heads=12, ffn=3072, vocab=50257, sequence=1024, tied=True
    )
    total = sum(unit_parameters(small, unit) for unit in unit_names(small))
    assert total - 50257 * 768 == 124_439_808


def test_cost_counts_products_and_attention() -> None:
    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 172
    assert unit_cost(LLAMA, "block.0000") == 2 * matrices + 2 * 64 * 32
    assert unit_cost(LLAMA, "embed") == 0
    assert unit_cost(LLAMA, "head") == 2 * 256 * 64


def test_tied_parameters_are_the_two_copies() -> None:
    tied = ModelSection(tied=True)
    assert tied_parameter(tied, "embed") == "tokens.weight"
    assert tied_parameter(tied, "head") == "output.weight"
    assert tied_parameter(tied, "block.0000") is None
    assert tied_parameter(ModelSection(), "head") is None


@pytest.mark.parametrize("chunks", range(1, 7))
def test_every_even_split_is_complete_and_best(chunks: int) -> None:
    model = ModelSection(layers=6, hidden=64, heads=4, kv_heads=4, ffn=172, vocab=4096, sequence=32)
    split = split_units(model, chunks)
    assert tuple(unit for units in split for unit in units) == unit_names(model)
    assert all(any(unit.startswith("block.") for unit in units) for units in split)

    def costliest(groups: tuple[tuple[str, ...], ...]) -> float:
        return max(sum(unit_cost(model, unit) for unit in units) for units in groups)

    every = []
    for cuts in combinations(range(1, 6), chunks - 1):
        edges = (0, *cuts, 6)
        counts = tuple(end - start for start, end in pairwise(edges))
        every.append(costliest(split_units(model, chunks, counts)))
    assert costliest(split) == min(every)


def test_a_heavy_head_gets_fewer_blocks() -> None:
    model = ModelSection(layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=50257)
    counts = [sum(unit.startswith("block.") for unit in units) for units in split_units(model, 4)]
    assert counts[-1] < counts[0]
    assert sum(counts) == 12


def test_explicit_split() -> None:
    assert split_units(LLAMA, 3, (1, 4, 1)) == (
        ("embed", "block.0000"),
        ("block.0001", "block.0002", "block.0003", "block.0004"),
        ("block.0005", "head"),
    )


@pytest.mark.parametrize(
    ("chunks", "split", "message"),
    [
        (7, (), "7 chunks .* layers is 6"),
        (0, (), "must be at least 1"),
        (3, (3, 3), "2 numbers; stages x chunks needs 3"),
        (2, (6, 0), "at least one block"),
        (2, (3, 4), "sums to 7 blocks but .* layers is 6"),
    ],
)
def test_impossible_splits(chunks: int, split: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        split_units(LLAMA, chunks, split)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelSection(family="bert"), "family is 'bert'"),
        (ModelSection(layers=0), "layers is 0"),
        (ModelSection(hidden=100, heads=8), "multiple of model.heads"),
        (ModelSection(heads=8, kv_heads=3), r"multiple of model.kv_heads \(3\)"),
        (ModelSection(hidden=24, heads=8), "must be even"),
    ],
)
def test_impossible_models(model: ModelSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_units(model, 1)


def test_unknown_unit() -> None:
    with pytest.raises(ConfigError, match=r"no unit 'block.0006'"):
        parameter_specs(GPT2, "block.0006")


# ---- chunks: the same initial bits on any split, and the same bits chained as whole


CPU = torch.device("cpu")
ODD_LLAMA = ModelSection(layers=5, hidden=48, heads=3, kv_heads=1, ffn=100, vocab=101, sequence=24)
ODD_GPT2 = ModelSection(
    family="gpt2", layers=5, hidden=48, heads=3, ffn=100, vocab=101, sequence=24, tied=True
)
BOTH = pytest.mark.parametrize("model", [ODD_LLAMA, ODD_GPT2], ids=["llama", "gpt2-tied"])


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
    chunk = whole(ODD_GPT2)
    embed, head = chunk.tied_parameter("embed"), chunk.tied_parameter("head")
    assert embed is not None and head is not None
    assert torch.equal(embed, head)
    assert embed.data_ptr() != head.data_ptr()
    assert chunk.tied_parameter("block.0000") is None
    assert whole(ODD_LLAMA).tied_parameter("head") is None
    assert not torch.equal(
        whole(ODD_LLAMA).unit_parameters("embed")["tokens.weight"],
        whole(ODD_LLAMA).unit_parameters("head")["output.weight"],
    )


def test_building_does_not_use_torchs_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    whole(ODD_LLAMA)
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
        build_chunk(ODD_LLAMA, units, 0, CPU)


def test_unknown_precision() -> None:
    with pytest.raises(ConfigError, match="precision is 'float64'"):
        compute_precision("float64", CPU)


# ---- counter-based randomness


def test_same_place_same_numbers() -> None:
    first = generator(1, step=2, microbatch=3, layer="embed", purpose="test")
    again = generator(1, step=2, microbatch=3, layer="embed", purpose="test")
    assert np.array_equal(first.random(100), again.random(100))


def test_every_part_of_the_place_counts() -> None:
    places = product((0, 1), (0, 1), (0, 1), ("", "a"), ("", "a"))
    draws = {
        generator(seed, step=step, microbatch=mb, layer=layer, purpose=purpose).bytes(16)
        for seed, step, mb, layer, purpose in places
    }
    assert len(draws) == 32


def test_numbers_stay_what_they_are() -> None:
    """Guards resumability across versions: a change here makes old runs unrepeatable."""
    drawn = generator(0, step=1, purpose="golden").integers(0, 1 << 32, 3, dtype=np.uint32)
    assert drawn.tolist() == GOLDEN


GOLDEN = [2026914762, 1095319492, 2784929758]


# ---- where samples are cut: all positions once, in slices that take equally long


LLAMA_8B = ModelSection(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=131072
)


@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from([0, 5]))
def test_slices_are_all_positions_once(sequence: int, count: int, window: int) -> None:
    model = ModelSection(hidden=32, heads=4, kv_heads=4, ffn=48, sequence=sequence, window=window)
    if count > sequence:
        with pytest.raises(ValueError, match=f"at most {sequence} slices"):
            sample_slices(model, count)
        return
    found = sample_slices(model, count)
    assert [position for own in found for position in own] == list(range(sequence))
    assert len(found) == count and all(found)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_later_slices_are_shorter_since_they_see_more(count: int) -> None:
    found = sample_slices(LLAMA_8B, count)
    assert all(own.start % GRANULE == 0 for own in found)
    lengths = [len(own) for own in found]
    assert lengths == sorted(lengths, reverse=True)
    # Of a block: 2 flops a weight of 218 million, and 4 x 4,096 a key that a query sees; the head in between.
    token = 2 * (32 * 218_103_808 + 128256 * 4096)
    work = [token * len(own) + 32 * 4 * 4096 * sum(at + 1 for at in own) for own in found]
    assert max(work) < 1.02 * sum(work) / count


def test_without_attention_to_speak_of_slices_are_equal() -> None:
    model = ModelSection(layers=2, hidden=4096, heads=8, kv_heads=8, ffn=16384, sequence=4096, window=8)
    assert [len(own) for own in sample_slices(model, 4)] == [1024] * 4
