"""An operator shuts a node out of a running run; a volunteer limits what its machine gives."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.telemetry.events import NodeLeft
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Run, Still
from wire.identity.token import JoinToken

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, snapshot_every=4),
    pipeline=replace(SMALL.pipeline, stages=2),
)

pytestmark = pytest.mark.timeout(240)


def test_an_evicted_node_is_out_at_once_and_for_good(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=0, steps=5)) as run:
        coordinator = run.start()
        assert coordinator.token
        shared = run.new_token()
        nodes = run.add_nodes(2, shared)
        still = run.wait_still()
        victim = run.node_at(1)
        number = nodes.index(victim)
        node_id = run.node_id(number)
        assert node_id is not None
        evict = run.command("evict", str(run.run_dir), node_id)
        assert evict.wait_exit() == 0
        token_id = JoinToken.parse(shared).token_id
        assert token_id in evict.lines[0] and "48 more" in evict.lines[0]
        assert victim.wait_exit() == 1
        assert any("evicted" in line and "new join line" in line for line in victim.lines)
        left = coordinator.wait_event(NodeLeft)
        assert (left.node_id, left.reason) == (node_id, "it was evicted")
        still.go_on()
        again = run.add_node(state_dir=run.state_dir(number))
        assert again.wait_exit() == 1
        assert "evicted" in again.complaints[-1]
        fresh_key = run.add_node(shared)
        assert fresh_key.wait_exit() == 1
        assert "admits no more nodes" in fresh_key.complaints[-1]
        create = run.command("token", "create", str(run.run_dir))
        assert create.wait_exit() == 0
        run.add_node(create.lines[0].removeprefix("thinwire join "))
        assert coordinator.wait_exit() == 0
        run.assert_undisturbed()
