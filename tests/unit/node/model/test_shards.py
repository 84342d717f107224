"""What tensor-parallel ranks hold: slices that make the whole again, and what cannot be cut."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.fp8.reference import blocks
from node.config.schema import LoraSection, ModelSection, RunConfig, TrainingSection
from node.model.lora_shapes import trained_specs
from node.model.shard_shapes import check_shards
from node.model.shards import merge, merge_states, shard, shard_state
from node.model.units import block_name, parameter_specs, unit_names
from wire.errors import RunError


@st.composite
def shared_models(draw: st.DrawFn) -> tuple[ModelSection, int]:
    """A model and a number of ranks that can share it."""
    ranks = draw(st.sampled_from((1, 2, 3, 4, 8)))
    kv_heads = ranks * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    model = ModelSection(
        family=draw(st.sampled_from(("llama", "gpt2"))),
        layers=1,
        hidden=heads * 2 * draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=kv_heads,
        ffn=ranks * draw(st.integers(1, 9)),
        vocab=draw(st.integers(1, 7)),
        sequence=ranks * draw(st.integers(1, 3)),
    )
    return model, ranks


@given(shared_models())
def test_shards_of_every_parameter_make_the_whole(shared: tuple[ModelSection, int]) -> None:
    model, ranks = shared
    check_shards(RunConfig(model=model), ranks)
    for unit in unit_names(model):
        for spec in parameter_specs(model, unit):
            whole = torch.arange(spec.elements, dtype=torch.float32).view(spec.shape)
            shards = [shard(unit, spec, whole, index, ranks) for index in range(ranks)]
            assert all(part.shape == spec.shard_shape(ranks) for part in shards)
            assert torch.equal(merge(spec, shards), whole)
            if spec.pieces is None:
                assert all(torch.equal(part, whole) for part in shards)
            else:
                held = torch.cat([part.flatten() for part in shards])
                assert torch.equal(held.sort().values, whole.flatten()), "no element twice, none left out"


def test_projections_are_cut_by_whole_heads() -> None:
    """Each element's value is its head, so a rank must see its own heads alone."""
    llama = ModelSection(layers=1, hidden=16, heads=4, kv_heads=2, ffn=8, vocab=8, sequence=8)
    specs = {spec.name: spec for spec in parameter_specs(llama, block_name(0))}
    heads = torch.arange(4.0).repeat_interleave(4)
    by_rows = shard(block_name(0), specs["query.weight"], heads[:, None].expand(16, 16), 1, 2)
    by_columns = shard(block_name(0), specs["attention_output.weight"], heads.expand(16, 16), 1, 2)
    assert by_rows[:, 0].tolist() == by_columns[0].tolist() == [2.0] * 4 + [3.0] * 4
    gpt2 = replace(llama, family="gpt2")
    specs = {spec.name: spec for spec in parameter_specs(gpt2, block_name(0))}
    places = torch.cat([heads, 10 + heads, 20 + heads])
    for name in ("qkv_projection.weight", "qkv_projection.bias"):
        whole = places[:, None].expand(48, 16) if name.endswith("weight") else places
        mine = shard(block_name(0), specs[name], whole, 1, 2)
        assert mine.reshape(24, -1)[:, 0].view(3, 2, 4)[..., 0].tolist() == [[2, 3], [12, 13], [22, 23]]


@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_state_in_e4m3_is_cut_with_its_blocks(family: str, rank: int) -> None:
    model = ModelSection(
        family=family, layers=1, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=8, sequence=8
    )
    config = RunConfig(model=model, lora=LoraSection(rank=rank))
    unit = block_name(0)
    specs = trained_specs(model, config.lora, unit)
    state: dict[str, torch.Tensor] = {"step": torch.tensor(3)}
    for spec in specs:
        elements = torch.arange(spec.elements)
        state[f"parameter.{spec.name}"] = elements.float().view(spec.shape)
        state[f"exp_avg.{spec.name}"] = elements // 128
        state[f"exp_avg_scale.{spec.name}"] = torch.arange(blocks(spec.elements))
    shards = [shard_state(config, unit, state, index, 2) for index in range(2)]
    for mine in shards:
        assert int(mine["step"]) == 3
        for spec in specs:
            assert torch.equal(
                mine[f"exp_avg_scale.{spec.name}"].repeat_interleave(128)[
                    : mine[f"exp_avg.{spec.name}"].numel()
                ],
                mine[f"exp_avg.{spec.name}"],
            ), "each code keeps its block"
    merged = merge_states(config, unit, shards)
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], state[name]) for name in state)


def test_a_state_of_another_model_is_refused() -> None:
    model = ModelSection(layers=1, hidden=16, heads=4, kv_heads=2, ffn=8, vocab=8, sequence=8)
    with pytest.raises(RunError, match=r"query.weight .*\[8, 16\], expected \[16, 16\]"):
        shard_state(
            RunConfig(model=model), block_name(0), {"parameter.query.weight": torch.zeros(8, 16)}, 0, 2
        )


def test_a_packed_base_is_cut_in_whole_blocks() -> None:
    model = ModelSection(layers=1, hidden=256, heads=4, kv_heads=4, ffn=384, vocab=8, sequence=8)
    config = RunConfig(model=model, lora=LoraSection(rank=4, base="4"))
    with pytest.raises(RunError, match=r"cuts rows of attention_output\.weight") as refused:
        check_shards(config, 4)
    assert "\n" not in str(refused.value)
    with pytest.raises(RunError, match=r"into 192, and lora\.base 4 needs multiples of 128"):
        check_shards(config, 2)
    check_shards(replace(config, model=replace(model, ffn=512)), 2)
    check_shards(replace(config, lora=LoraSection(rank=4)), 4)


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        ({"heads": 6, "hidden": 24, "kv_heads": 6}, 4, "does not divide this run's model.heads 6"),
        ({"kv_heads": 1}, 2, "does not divide this run's model.kv_heads 1"),
        ({"ffn": 30}, 4, "does not divide this run's model.ffn 30"),
        ({"sequence": 9}, 2, "does not divide this run's model.sequence 9"),
    ],
)
def test_sizes_that_cannot_be_cut_are_one_line(sizes: dict[str, int], ranks: int, message: str) -> None:
    model = ModelSection(layers=1, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=8, sequence=16)
    with pytest.raises(RunError, match=message) as caught:
        check_shards(RunConfig(model=replace(model, **sizes)), ranks)
    assert "\n" not in str(caught.value)


def test_moments_in_e4m3_need_whole_blocks() -> None:
    model = ModelSection(layers=1, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=8, sequence=16)
    config = RunConfig(model=model, training=TrainingSection(moments="fp8"))
    check_shards(config, 2)
    with pytest.raises(RunError, match=r"attention_output.weight \[256, 256\] into runs of 64"):
        check_shards(config, 4)
    check_shards(replace(config, training=TrainingSection()), 4)
