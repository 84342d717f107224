"""`trellis-R`'s Triton kernels give the CPU's words under Triton's interpreter."""

import pytest
import torch

from kernels.trellis import lanes as trellis_lanes
from kernels.trellis import reference as trellis
from kernels.trellis.grid import Grid
from kernels.trellis.tables import DITHERED
from tests.support.interpreter import inside
from tests.support.trellis_cases import empty_lanes, encode_lanes

pytestmark = inside


@pytest.mark.parametrize(
    ("where", "highest", "salt"),
    [
        (Grid(300, 2, 7, 32), 19, None),
        (Grid(61, 3, 5, 5), 59, None),
        (Grid(61, 3, 5, 5), 59, 2**32 - 77),
        (Grid(10, 1, 10, 1), 103, 2**32 - 77),
        (Grid(1, 1, 1, 1), 12, None),
    ],
    ids=str,
)
def test_lanes_give_the_cpus_words(where: Grid, highest: int, salt: int | None) -> None:
    from kernels.trellis.triton import decode as triton_trellis_decode

    family = where.groups % 2
    generator = torch.Generator().manual_seed(where.elements)
    number = torch.randint(0, highest + 1, (where.elements,), generator=generator).to(torch.uint8)
    x = torch.randn(where.elements, generator=generator) * torch.exp2((number.float() - 12) / 4)
    x[::19] = 5000
    gain = trellis.gain(9000)
    if salt is not None:
        family += DITHERED
    expected = trellis_lanes.encode(x, number, gain, where, family, salt)
    made = encode_lanes(x, number, gain, where, family, salt)
    assert torch.equal(made.states, expected.states) and torch.equal(made.counts, expected.counts)
    counts, capacity = expected.counts.long(), where.capacity
    each = zip(expected.words, counts.tolist(), strict=True)
    words = torch.cat([group[capacity - count :] for group, count in each])
    joined = torch.full_like(words, -23131)
    trellis_lanes.join(made, joined)
    assert torch.equal(joined, words)
    n, whole = triton_trellis_decode.decode(made.states, counts, joined, number, where, family)
    found, right = trellis_lanes.decode(expected.states, counts, words, number, where, family)
    assert whole and right and torch.equal(n, found)
    # Counts that no encoder sends: refused, nothing read outside.
    for wrong in (counts - 1, *((counts + 1, counts + (1 << 31)) if where.groups > 1 else ())):
        assert not triton_trellis_decode.decode(made.states, wrong, joined, number, where, family)[1]


def test_only_symbols_are_coded_as_such() -> None:
    """Multiples of a step around the last symbols and the place that the escape's own has, and below all."""

    where, code = Grid(64, 1, 2, 32), 9000
    number = torch.full((where.elements,), 19, dtype=torch.uint8)
    x = torch.cat((torch.arange(76, 108), torch.arange(-108, -76))) * trellis.step_of(code)
    for family in range(2):
        expected = trellis_lanes.encode(x, number, trellis.gain(code), where, family)
        made = encode_lanes(x, number, trellis.gain(code), where, family)
        count = int(expected.counts)
        assert torch.equal(made.states, expected.states) and torch.equal(made.counts, expected.counts)
        assert torch.equal(made.words[0, -count:], expected.words[0, -count:])


def test_lanes_follow_the_given_path() -> None:
    """Two families at once, into slots of their own, from elements further on; a third does not run."""
    from kernels.trellis.triton import state as at

    where, offset, gain = Grid(61, 3, 5, 5), 7, trellis.gain(9000)
    generator = torch.Generator().manual_seed(3)
    number = torch.randint(0, 30, (where.elements,), generator=generator).to(torch.uint8)
    x = torch.randn(offset + where.elements, generator=generator) * 20
    lanes = empty_lanes(where, torch.device("cpu"), slots=3, at_once=3)
    for part in (lanes.states, lanes.counts, lanes.words):
        part.fill_(-23131)
    control = torch.zeros(3, at.CONTROLS, dtype=torch.int64)
    for i, (family, slot) in enumerate(((1, 2), (0, 0))):
        control[i, at.ACTIVE], control[i, at.OF_FAMILY] = 1, family
        control[i, at.TO_SLOT], control[i, at.OFFSET] = slot, offset
    control[2, at.TO_SLOT] = 1
    lanes.encode(x, number, control, torch.tensor([gain], dtype=torch.float64))
    for family, slot in ((1, 2), (0, 0)):
        expected = trellis_lanes.encode(x[offset:], number, gain, where, family)
        assert torch.equal(lanes.states[slot], expected.states)
        assert torch.equal(lanes.counts[slot], expected.counts)
        for made, wanted, count in zip(
            lanes.words[slot], expected.words, expected.counts.tolist(), strict=True
        ):
            assert torch.equal(made[-count:], wanted[-count:]) and (made[:-count] == -23131).all()
    assert all((part[1] == -23131).all() for part in (lanes.states, lanes.counts, lanes.words))
