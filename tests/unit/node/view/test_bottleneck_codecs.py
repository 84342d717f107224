"""The codecs that the bottleneck's advice proposes: order, purpose and wording."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from node.cli.main import build_parser
from node.telemetry import events
from node.view.view_builder import view
from tests.support.paths import ROOT
from tests.support.run_events import history, started
from tests.unit.node.view.test_bottleneck import GPU, link, on, says, seen, stage
from wire.codecs.formats import codec_format, proposed_names


def results(file: str, key: str) -> list[dict[str, Any]]:
    """What an experiment measured."""
    found: list[dict[str, Any]] = json.loads((ROOT / "scripts/results" / file).read_text("utf-8"))[key]
    return found


def test_the_commands_that_are_named_exist() -> None:
    """`RUN_DIR` put in, they are what the command line takes."""
    stages = [stage(n, forward=0.1, backward=0.1) for n in range(2)]
    full = seen(stages, [link(0, 1, 96, 100, codec="fp32"), link(1, 0, 95, 100, codec="fp32")])
    waits = view(history(started(), events.TokenUses(left=0))).bottleneck
    named = re.findall(r"`thinwire ([^`]+)`", " ".join((says(full), *waits)))
    assert [one.split()[0] for one in named] == ["set", "token"]
    for one in named:
        build_parser().parse(one.split())


def test_codecs_are_named_in_the_order_of_their_errors() -> None:
    """On tensors between stages; `trellis-4`, which was not measured there, on normal numbers."""
    errors: dict[str, list[float]] = {}
    for one in results("boundary_error.json", "results"):
        errors.setdefault(one["codec"], []).append(one["relative_error"])
    for one in results("rivals.json", "results"):
        if one["package"] == "thinwire":
            errors.setdefault(one["method"], []).append(one["relative_error"])
    for one in results("codec_speed.json", "results"):
        errors.setdefault(one["codec"], [one["relative_error"]])
    means = [sum(errors[name]) / len(errors[name]) for name in proposed_names()]
    assert means == sorted(means), dict(zip(proposed_names(), means, strict=True))


def test_packing_costs_are_the_measured_ones() -> None:
    measured: dict[str, list[tuple[float, float]]] = {}
    for one in results("codec_speed.json", "results"):
        times = (one["encode_cpu_nanoseconds_per_element"], one["decode_cpu_nanoseconds_per_element"])
        measured.setdefault(one["codec"], []).append(times)
    for one in results("rivals.json", "speeds"):
        if one["package"] == "thinwire":
            times = (one["encode_nanoseconds_per_element"], one["decode_nanoseconds_per_element"])
            measured.setdefault(one["method"], []).append(times)
    for name in ("fp32", "bf16", "fp16", "fixed-8", "tah", "trellis-4.41"):
        slowest = [max(column) for column in zip(*measured[name], strict=True)]
        assert codec_format(name).core_nanoseconds == pytest.approx(slowest, rel=0.3), name


def test_trellis_is_not_proposed_where_its_packing_takes_what_it_saves() -> None:
    stages = [stage(0, forward=0.1, backward=0.1), stage(1, forward=0.1, backward=0.1)]
    run = seen(stages, [link(0, 1, 20, 100), link(1, 0, 96, 100)])
    # 1.9 million elements a tensor: 0.17 s of packing for each of 8 microbatches in a second.
    assert "`fixed-6` to `tah` backward would" in says(run)
    assert "`fixed-6` to `trellis-4.41` backward would give about 1." in says(on(GPU, run))
    # On a link so slow that packing is nothing beside it, processors have the time for it.
    slow = seen(stages, [link(0, 1, 0.2, 1), link(1, 0, 0.96, 1)])
    assert "`fixed-6` to `trellis-4.41` backward would give about 1." in says(slow)
    # Unless they report that they are far slower than the core that was measured.
    laden = tuple(
        replace(one, shares={**one.shares, "encode": 0.5, "wait-downstream": one.waiting - 0.5})
        for one in slow.stages
    )
    assert "trellis" not in says(replace(slow, stages=laden))
