"""A curve over steps that never grows beyond a bound: neighbouring points are merged as it gets longer."""

from dataclasses import dataclass

MOST_POINTS = 512
"""A curve has at most so many points, and at least half as many once it was full."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Columns of equal length. A point stands for `stride` steps, the last one perhaps for fewer."""

    stride: int
    steps: tuple[int, ...]
    """The last step of each point; the first step of a run is 1."""
    times: tuple[float, ...]
    """Unix seconds at which that step was done."""
    values: tuple[float, ...]
    """Mean over the point's steps."""


@dataclass
class _Point:
    first: int
    last: int
    at: float
    total: float
    count: int


class Series:
    """Collects a curve step by step. A step that comes again, after a rollback, replaces what it gave."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        """`most_points` is even and at least 2."""
        self._most = most_points
        self._stride = 1
        self._points: list[_Point] = []

    def add(self, step: int, at: float, value: float) -> None:
        points = self._points
        while points and points[-1].first >= step:
            points.pop()
        if points and points[-1].last >= step:
            # A merged point in whose middle the run went back: its mean stays, its later steps are counted
            # once.
            return
        newest = points[-1] if points else None
        if newest is not None and newest.count < self._stride:
            newest.last, newest.at = step, at
            newest.total += value
            newest.count += 1
            return
        points.append(_Point(step, step, at, value, 1))
        if len(points) > self._most:
            self._merge()

    def curve(self) -> Curve:
        return Curve(
            stride=self._stride,
            steps=tuple(point.last for point in self._points),
            times=tuple(point.at for point in self._points),
            values=tuple(point.total / point.count for point in self._points),
        )

    def _merge(self) -> None:
        """Join points two by two; one may be left over at the end, to be filled up."""
        self._stride *= 2
        merged: list[_Point] = []
        for point in self._points:
            if merged and merged[-1].count < self._stride:
                into = merged[-1]
                into.last, into.at = point.last, point.at
                into.total += point.total
                into.count += point.count
            else:
                merged.append(point)
        self._points = merged
