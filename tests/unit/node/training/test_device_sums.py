"""Sums on a device are those of packed pieces, to the bit."""

import pytest
import torch

from node.model.units import unit_names
from node.schedule.gradient_groups import model_pieces
from node.training.group_sums import CodecPacking
from tests.support import device_sums
from tests.support.cases import each
from tests.support.device_sums import DeviceSums, GroupSums, batches
from tests.support.grouped_gradients import configured, gradients
from wire.errors import NonFiniteError

CPU = torch.device("cpu")


@each(
    ("codec", "groups", "most"),
    [
        ("fp32", 2, 1 << 27),
        ("bf16", 4, 1 << 27),
        ("fp16", 3, 1 << 16),
        ("fixed-8", 4, 1),
        ("trellis-4.41", 3, 1 << 27),
    ],
)
def test_sums_are_those_of_packed_pieces(
    codec: str, groups: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(codec, groups)
    units = unit_names(config.model)
    monkeypatch.setattr(device_sums, "MOST_ELEMENTS", most)
    sums = (
        GroupSums(config, units, CodecPacking(CPU), of_round=False),
        DeviceSums(config, units, of_round=False),
    )
    for group in range(groups):
        for one in sums:
            one.group_done(group, gradients(config, group))
    packed, on_device = (dict(one.finish()) for one in sums)
    assert list(packed) == list(on_device) == list(units)
    for unit, values in packed.items():
        assert list(values) == list(on_device[unit])
        for name, value in values.items():
            assert torch.equal(value.view(torch.int32), on_device[unit][name].view(torch.int32))


def test_the_unit_that_is_not_finite_is_named() -> None:
    config = configured("fixed-8", 2)
    units = unit_names(config.model)
    sums = DeviceSums(config, units, of_round=False)
    for group in range(2):
        found = gradients(config, group)
        if group:
            next(iter(found[units[1]].values()))[5] = float("nan")
            with pytest.raises(NonFiniteError, match=f"of {units[1]} .a tensor of shape"):
                sums.group_done(group, found)
        else:
            sums.group_done(group, found)


def test_batches_hold_each_piece_once() -> None:
    config = configured("fixed-8")
    pieces = [piece for several in model_pieces(config).values() for piece in several]
    for most in (1, 100_000, 1 << 27):
        found = batches(pieces, most)
        numbers = [piece.number for batch in found for piece in batch.pieces]
        assert sorted(numbers) == [piece.number for piece in pieces]
        for batch in found:
            assert len({(piece.codec, piece.elements) for piece in batch.pieces}) == 1
            assert len(batch.pieces) == 1 or sum(piece.elements for piece in batch.pieces) <= most
