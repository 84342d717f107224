"""What packing takes a node: as tried, slowed as its steps show, and told when it changes."""

import pytest

from node.stage.packing_meter import LEAST_TENSORS, PackingMeter
from node.telemetry.clock import WorkKind
from wire.telemetry import CodecTime, CodecTimes


def said(times: CodecTimes | None) -> dict[str, tuple[float, float]]:
    return {} if times is None else {one.codec: (one.pack, one.unpack) for one in times.times}


def test_steps_slow_what_packs_in_the_same_way_until_they_use_it_again() -> None:
    meter = PackingMeter()
    assert meter.news() == CodecTimes(times=()) or meter.news() is None
    meter.tried("trellis-4.41", 4e-8, 1e-8)
    meter.tried("trellis-8", 6e-8, 1e-8)
    meter.tried("fixed-8", 2e-9, 2e-9)
    assert said(meter.news())["trellis-8"] == (6e-8, 1e-8)
    assert meter.news() is None, "nothing is new"
    for _ in range(LEAST_TENSORS):
        meter.add(WorkKind.PACK, "trellis-5", 1000, 3 * 5e-5)
        meter.add(WorkKind.PACK, "fp32", 1000, 9.0)  # nobody tried it
    slowed = said(meter.news())
    assert slowed["trellis-4.41"] == pytest.approx((1.2e-7, 3e-8))
    assert slowed["fixed-8"] == (2e-9, 2e-9)
    # Steps with another codec leave that as it is.
    for _ in range(LEAST_TENSORS):
        meter.add(WorkKind.UNPACK, "fixed-8", 1000, 2e-6)
    assert meter.news() is None
    for _ in range(LEAST_TENSORS):
        meter.add(WorkKind.PACK, "trellis-8", 1000, 5e-5)
    assert said(meter.news())["trellis-8"] == pytest.approx((6e-8, 1e-8))


def test_a_coordinator_that_begins_anew_is_told_all() -> None:
    meter = PackingMeter()
    meter.tried("fixed-8", 2e-9, 3e-9)
    first = meter.news()
    assert first == CodecTimes(times=(CodecTime(codec="fixed-8", pack=2e-9, unpack=3e-9),))
    assert meter.news() is None
    meter.forget_told()
    assert meter.news() == first
