"""Tensors that share lines, by hand."""

from math import inf

import pytest

from node.pipeline.schedule import BoundaryTensor, Kind
from node.pipeline.transfers import Transfer, Transfers, fair_paces


def transfer(size: float, *, latency: float = 0.0, **seconds: float) -> Transfer:
    return Transfer(
        tensor=BoundaryTensor(Kind.FORWARD, 0, 0), size=size, seconds=dict(seconds), latency=latency
    )


def test_equal_rates_on_a_shared_line_and_the_rest_to_those_that_can_use_it() -> None:
    # A line of 10 bytes a second; the receiver of the second takes 2.
    small, held_up = transfer(10, up=1.0), transfer(10, up=1.0, down=5.0)
    assert fair_paces([small]) == [1.0]
    assert fair_paces([small, small]) == [2.0, 2.0], "5 bytes a second each"
    assert fair_paces([small, held_up]) == [pytest.approx(1.25), pytest.approx(5.0)], "8 and 2"
    # A large tensor has the same rate as a small one, so it takes longer.
    assert fair_paces([small, transfer(30, up=3.0)]) == [2.0, 6.0]
    assert fair_paces([transfer(10, up=1.0), transfer(10, other=3.0)]) == [1.0, 3.0]


def test_a_tensor_is_faster_once_another_has_left_the_line() -> None:
    lines = Transfers()
    lines.add((1, 0), transfer(10, up=1.0), 0.0)
    lines.add((1, 2), transfer(20, up=2.0), 0.5)
    lines.add((1, 0), transfer(10, up=1.0, latency=3.0), 0.6)
    ended = []
    while lines.next_end < inf:
        now, ends, sent = lines.end()
        ended.append((now, ends, sent.latency))
    # Half of the first is left at 0.5 and takes a second beside the second; that has 15 bytes left at 1.5,
    # which the third, queued behind the first, shares with it until both have sent 10.
    assert ended == [
        (pytest.approx(1.5), (1, 0), 0.0),
        (pytest.approx(3.5), (1, 0), 3.0),
        (pytest.approx(4.0), (1, 2), 0.0),
    ]


def test_lines_without_a_limit_take_no_time() -> None:
    lines = Transfers()
    lines.add((0, 1), transfer(10, up=0.0), 2.0)
    assert lines.next_end == 2.0
    assert lines.end()[0] == 2.0 and lines.next_end == inf
