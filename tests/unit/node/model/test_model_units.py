"""Layer units, their parameters and costs, and how they are split into chunks."""

from itertools import combinations, pairwise

import pytest

from node.config.schema import ModelSection
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
