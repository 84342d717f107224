"""Where samples are cut: all positions once, in slices that take equally long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.schema import ModelSection
from node.model.slices import GRANULE, sample_slices

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
