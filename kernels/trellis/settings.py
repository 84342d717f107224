"""The settings of a `trellis` encoding. They depend on the tensor's shape and the rate, not on its values."""

from dataclasses import dataclass

from kernels.trellis.grid import Grid, grid

# A lane's state takes 32 bits and saves 8 bits of its words on average.
LANE_BITS = 24


@dataclass(frozen=True, kw_only=True)
class Settings:
    rows: int
    columns: int
    size: int
    """Bytes of the payload."""
    every: int
    """Each plan is tried on one row in this many."""
    measured: int
    """One row in this many is coded to measure what elements cost."""
    shared_scales: bool
    """Whether plans with one scale for all rows, all columns or both are also tried."""
    kinds: tuple[tuple[int, int], ...]
    """(rank, bits) of the predictions to try; ranks up to 32."""
    attempts: int
    """The most steps to try."""
    enough: int
    """Attempts after which the search ends if one has fitted."""
    free: float
    """Share of the budget to leave free, because costs are estimates."""
    too_free: int
    """With more bytes than this left over, another attempt is made."""
    first_family: int = 0
    """The first table family to use: those of `kernels.trellis.tables` with or without dither."""

    @property
    def grid(self) -> Grid:
        return grid(self.rows * self.columns)

    @property
    def group_bits(self) -> int:
        """Bits of the groups' counts and states, which a cost does not include."""
        return self.grid.groups * (32 + self.grid.lanes * LANE_BITS)

    @property
    def sample_rows(self) -> int:
        return -(-self.rows // self.every)

    @property
    def measured_rows(self) -> int:
        return -(-self.rows // self.measured)

    @property
    def plain(self) -> int:
        """The number of plans without a prediction."""
        return 4 if self.shared_scales else 1

    @property
    def plans(self) -> list[tuple[int, int, int, int]]:
        """Each plan's rank and bits, and whether every row and every column has its own scale."""
        sides = [(1, 1), (1, 0), (0, 1), (0, 0)][: self.plain]
        return [*((0, 0, *pair) for pair in sides), *((*kind, 1, 1) for kind in self.kinds)]
