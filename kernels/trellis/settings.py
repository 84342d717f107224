"""What the shape of a tensor and the rate decide of a `trellis` encoding, before anything is known of it."""

from dataclasses import dataclass

from kernels.trellis.grid import Grid, grid

# A lane's state takes 32 bits and saves 8 of its words' on average.
LANE_BITS = 24


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What shape and rate decide of an encoding."""

    rows: int
    columns: int
    size: int
    """Bytes of the payload."""
    every: int
    """Of the rows, one in so many is tried with every plan."""
    measured: int
    """And one in so many is coded to see what elements cost."""
    untold: bool
    """Whether scales of rows, of columns and of both are also tried as one."""
    kinds: tuple[tuple[int, int], ...]
    """Ranks, at most 32, and bits of the predictions that are tried."""
    attempts: int
    """At steps, at most."""
    enough: int
    """Attempts, if one has fitted."""
    free: float
    """Share of the budget that is left free, because a cost is an estimate."""
    too_free: int
    """Bytes of which no more are left free if there may be another attempt."""

    @property
    def grid(self) -> Grid:
        return grid(self.rows * self.columns)

    @property
    def group_bits(self) -> int:
        """Bits of the groups beside their words' own, as a cost does not count them."""
        return self.grid.groups * (32 + self.grid.lanes * LANE_BITS)

    @property
    def sample_rows(self) -> int:
        return -(-self.rows // self.every)

    @property
    def measured_rows(self) -> int:
        return -(-self.rows // self.measured)

    @property
    def plain(self) -> int:
        """Plans that predict nothing."""
        return 4 if self.untold else 1

    @property
    def plans(self) -> list[tuple[int, int, int, int]]:
        """Rank, bits, whether rows are told apart, and columns."""
        told = [(1, 1), (1, 0), (0, 1), (0, 0)][: self.plain]
        return [*((0, 0, *pair) for pair in told), *((*kind, 1, 1) for kind in self.kinds)]
