"""A run's reports: every stage's time by kind, and the bytes that `config explain` estimates."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from node.telemetry.clock import TimeKind
from node.telemetry.events import StepDone
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Run

STAGES = 3
CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=15),
    model=replace(SMALL.model, layers=3, hidden=64, ffn=96, sequence=64, tied=True),
    training=replace(SMALL.training, microbatch=4),
    pipeline=replace(SMALL.pipeline, stages=STAGES, forward_codec="tah", backward_codec="fixed-8"),
)


@pytest.mark.timeout(240)
def test_time_and_bytes_are_accounted_for(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        coordinator = run.start()
        run.add_nodes(STAGES)
        explain = run.command("config", "explain", str(run.run_file), "--json")
        run.assert_quiet()
        steps = coordinator.all(StepDone)
        summary = coordinator.summary
        foretold = json.loads("\n".join(explain.lines))

    seconds = sum(step.seconds for step in steps)
    assert summary.seconds == pytest.approx(seconds)
    assert summary.steps == len(steps) == CONFIG.run.steps
    assert summary.tokens == CONFIG.run.steps * foretold["tokens_per_step"]
    assert summary.tokens_per_second == pytest.approx(summary.tokens / seconds)
    for stage, times in enumerate(summary.stages):
        assert times.stage == stage
        assert times.seconds.keys() == {kind.value for kind in TimeKind}
        assert min(times.seconds.values()) >= 0
        assert sum(times.seconds.values()) == pytest.approx(times.wall_seconds, rel=0.02)
        # It begins when the stage hears of the first step, and ends when it reports the last. On a busy
        # machine these two are off the coordinator's own clock, each by no more than its step takes.
        ends = steps[0].seconds + steps[-1].seconds
        assert seconds - ends <= times.wall_seconds <= 1.02 * seconds + ends
        for kind in ("forward", "backward", "encode", "decode", "optimizer"):
            assert times.seconds[kind] > 0
        for step in steps:
            assert 0 <= step.idle[stage] <= 1
    # The last stage has always voted when the first one does its last backward.
    assert summary.stages[-1].seconds["wait-votes"] > 0

    # Directions sum to what each stage sends and receives, over the link to a tied model's head too.
    for stage in range(STAGES):
        for mbits, end in (("up_mbit", "sender"), ("down_mbit", "receiver")):
            counted = sum(getattr(step, mbits)[stage] * step.seconds * 1e6 / 8 for step in steps) / len(steps)
            expected = sum(link["bytes"] for link in foretold["links"] if link[end] == stage)
            assert counted == pytest.approx(expected, rel=0.01)
    everything = sum(link["bytes"] for link in foretold["links"])
    assert summary.link_bytes / len(steps) == pytest.approx(everything, rel=0.01)
    for key, in_full in (("link_bytes_fp32", "bytes_fp32"), ("link_bytes_bf16", "bytes_bf16")):
        assert getattr(summary, key) == len(steps) * sum(flow[in_full] for flow in foretold["flows"])

    # Bits an element count frames alone, so they are exactly as foretold, in every step.
    for what, bits in (("activation", "bits_forward"), ("gradient", "bits_backward")):
        flows = [flow for flow in foretold["flows"] if flow["what"] == what]
        exact = 8 * sum(flow["bytes"] for flow in flows) / sum(flow["elements"] for flow in flows)
        assert [getattr(step, bits) for step in steps] == pytest.approx([exact] * len(steps), rel=1e-12)
        assert getattr(summary, bits) == pytest.approx(exact, rel=1e-12)
    assert summary.bits_forward < 5 < summary.bits_backward < 10
