"""How the elements of a tensor are spread over the lanes of the `trellis` codec.

A group is a run of elements that is coded separately, into its own stream. Its lanes share the run step by
step, so that neighbours in memory are in neighbouring lanes: element i of a group is step i // lanes of lane
i % lanes. A GPU gives every group a warp and every lane a thread.
"""

from dataclasses import dataclass

LANES = 32
# The most and the fewest elements of a lane. The fewest decide the number of lanes of a small tensor.
_STEPS = 2048
_FEWEST = 1152
# Lanes of a trial encoding are shorter by this factor.
_SHORTER = 8
# The most bits of one element in a lane: a symbol of one slot, and an escape's 26 bits below it.
_BITS = 12 + 26


@dataclass(frozen=True, slots=True)
class Grid:
    """`groups` of `steps` x `lanes` elements; the last group may have fewer."""

    elements: int
    groups: int
    steps: int
    lanes: int

    @property
    def group_elements(self) -> int:
        return self.steps * self.lanes

    @property
    def capacity(self) -> int:
        """The most words that a group can take."""
        return self.lanes * (-(-self.steps * _BITS // 16) + 2)

    def bounds(self, group: int) -> tuple[int, int]:
        """The first element of a group and the first after it."""
        size = self.group_elements
        return group * size, min((group + 1) * size, self.elements)


def grid(elements: int) -> Grid:
    return _grid(elements, _STEPS, _FEWEST)


def trial_grid(elements: int) -> Grid:
    """The grid of a trial encoding, which is counted and not sent.

    Shorter lanes take less time on a GPU. The bits that they cost do not matter.
    """
    return _grid(elements, _STEPS // _SHORTER, _FEWEST // _SHORTER)


def _grid(elements: int, most: int, fewest: int) -> Grid:
    lanes = min(LANES, max(1, elements // fewest))
    groups = -(-elements // (lanes * most))
    steps = -(-elements // (groups * lanes))
    return Grid(elements, -(-elements // (steps * lanes)), steps, lanes)
