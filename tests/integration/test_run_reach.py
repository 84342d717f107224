"""A run of nodes that open no port: neighbours come by the coordinator's relay, and the bits are the same."""

import asyncio
import re
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from node.display.watch import HistoryWatch
from node.processes import reach_check
from node.telemetry.events import NodeJoined, Notice, PageServed, StepAborted, StepCosts
from tests.support.fault_prefork import Prefork
from tests.support.faulty_relay import faulty_port
from tests.support.memory_pipeline import reference_run
from tests.support.ports import free_port, listening
from tests.support.run_harness import SMALL, TINY, Run, Still
from wire.identity.token import JoinToken

CONFIG = replace(SMALL, pipeline=replace(SMALL.pipeline, stages=3))

INTERRUPTED = 130

pytestmark = pytest.mark.timeout(240)


def paths(costs: StepCosts) -> set[str]:
    """The ways that a step's frames took."""
    return {link.path for link in costs.links}


def test_nodes_that_open_no_port_train_the_same_weights(prefork: Prefork, tmp_path: Path) -> None:
    """The coordinator's relay carries all of three stages' tensors, also after a node died."""
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=1, steps=4)) as run:
        coordinator = run.start()
        run.program = ("tests.support.apart_node",)
        nodes = [run.add_node(options=("--no-listen",)) for _ in range(3)]
        still = run.wait_still()
        assert {event.address for event in coordinator.all(NodeJoined)} == {""}
        assert [listening(node.pid) for node in nodes] == [set()] * len(nodes)
        with urllib.request.urlopen(f"{coordinator.wait_event(PageServed).url}metrics", timeout=60) as answer:
            text = answer.read().decode()
        carried = re.search(r"^thinwire_relay_bytes_total (\S+)$", text, re.MULTILINE)
        assert carried is not None and float(carried[1]) > 0
        still.kill()
        run.add_node(run.new_token(), options=("--no-listen",))
        assert coordinator.wait_exit() == 0
        run.assert_undisturbed()
        shown = HistoryWatch(run.run_dir).view().links
        assert {(link.path, link.why_not_direct) for link in shown} == {
            (
                "relay",
                f"the node of stage {stage} opens no port and the node of stage {stage + 1} opens no port",
            )
            for stage in (0, 1)
        }


@pytest.mark.parametrize("fault", ["dies", "trickles"])
def test_a_volunteer_relays_and_when_it_fails_the_link_goes_on(
    prefork: Prefork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It joins in mid-run and carries the link from then on. After its death, or once it holds up
    what it is to carry, the coordinator's relay does. No step is lost or run again."""
    monkeypatch.setattr(reach_check, "CONTACT_SECONDS", 60.0)
    config = replace(
        CONFIG,
        model=TINY,
        pipeline=replace(CONFIG.pipeline, stages=2),
        run=replace(CONFIG.run, steps=100_000),
    )
    with Run(tmp_path, config, launch=prefork.popen, still=Still(stage=1, steps=4)) as run:
        coordinator = run.start()
        # Nothing is learnt from thousands of steps beside the links' own deadlines.
        run.program = ("tests.support.slow_node", "tests.support.apart_node")
        for _ in range(2):
            run.add_node(options=("--no-listen",))
        still = run.wait_still()
        run.program = ("tests.support.apart_node",)
        if fault != "dies":
            run.program = ("tests.support.faulty_relay",)
        relay = run.add_node(run.new_token(), options=("--relay", "200"))
        coordinator.wait_event(NodeJoined, lambda event: event.listens)
        still.go_on()
        path = f"relay {run.node_id(2)}"
        by_relay = coordinator.wait_event(StepCosts, lambda costs: path in paths(costs))
        if fault == "dies":
            doctor = asyncio.run(reach_check._find_by(JoinToken.parse(coordinator.token)))
            assert doctor is not None
            (sentence,) = doctor.links
            by = r"0 and 1 \(\d+\.\d Mbit/s\): relay \(.+\), because the node of stage 0 opens"
            assert re.match(by, sentence)
            relay.kill()
        else:
            left = f" left the relay of node {run.node_id(2)}: "
            coordinator.wait_event(Notice, lambda notice: left in notice.text)
        coordinator.wait_event(
            StepCosts, lambda costs: costs.step > by_relay.step and paths(costs) == {"relay"}
        )
        # However long all that took, the operator ends the run.
        coordinator.interrupt()
        assert coordinator.wait_exit() == INTERRUPTED
        run.assert_quiet()
        assert coordinator.all(StepAborted) == []
        assert {link.path for link in HistoryWatch(run.run_dir).view().links} == {"relay"}
        taken, weights = reference_run(run.config, len(run.losses))
        assert run.losses == {number: step.loss for number, step in enumerate(taken, start=1)}
        assert run.weights_sha256 == weights


def test_a_run_through_a_relay_with_every_fault_has_the_same_bits(prefork: Prefork, tmp_path: Path) -> None:
    """Every byte goes through the coordinator's relay, whose connections are delayed, throttled, cut, frozen,
    and lose, repeat, reorder and change bytes."""
    port = free_port()
    with faulty_port(port) as spoilt:
        config = replace(
            CONFIG,
            model=TINY,
            pipeline=replace(CONFIG.pipeline, stages=2),
            run=replace(CONFIG.run, steps=80),
            coordinator=replace(
                CONFIG.coordinator, listen=f"127.0.0.1:{port}", advertise=(f"127.0.0.1:{spoilt.port}",)
            ),
        )
        with Run(tmp_path, config, launch=prefork.popen) as run:
            coordinator = run.start()
            run.program = ("tests.support.impatient_node",)
            for _ in range(2):
                run.add_node(options=("--no-listen",))
            assert coordinator.wait_exit() == 0
            assert spoilt.to_come == []
            run.assert_undisturbed()
            assert {link.path for link in HistoryWatch(run.run_dir).view().links} == {"relay"}
