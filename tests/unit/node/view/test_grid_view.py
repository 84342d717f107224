"""Several rows on display: each stage in its row, links within and between rows, and which row limits."""

from copy import copy
from dataclasses import replace

import pytest

from node.telemetry import events
from node.telemetry.costs import group_seconds, mbit_by_stage, row_costs
from node.view.bottleneck import bottleneck
from node.view.run_view import RunView
from node.view.view_builder import RunViewBuilder, view
from tests.support import run_events
from tests.support.run_events import history, joined, link_cost, stage_cost, started
from wire.figures import Place

NODES = ("node-aaaa", "node-bbbb", "node-cccc", "node-dddd")
GROUPS = ((0, 1, 2), (3,))


def placed(groups: tuple[tuple[int, ...], ...] = GROUPS) -> events.PlacementMade:
    return events.PlacementMade(epoch=1, nodes=NODES, resume_step=0, blocks=(4, 4), groups=groups)


def costs(step: int, sync: tuple[float, float] = (0.0, 0.4), size: int = 1_000_000) -> events.StepCosts:
    """The row that syncs longest waits for the other."""
    stages = [
        replace(stage_cost(stage, NODES[2 * row + stage], sync=sync[row], backward=0.3), replica=row)
        for row in range(2)
        for stage in range(2)
    ]
    inside = [
        replace(link_cost(*way, capacity=4e6), source_replica=row, target_replica=row)
        for row in range(2)
        for way in ((0, 1), (1, 0))
    ]
    across = [
        replace(link_cost(0, 0, size=size, capacity=4e6), source_replica=row, target_replica=1 - row)
        for row in range(2)
    ]
    links = (*inside, *across)
    return events.StepCosts(step=step, seconds=1.0, aborted=False, stages=tuple(stages), links=links)


def done(step: int) -> events.StepDone:
    four = (0.1, 0.2, 0.3, 0.4)
    return replace(run_events.done(step), idle=four, up_mbit=four, down_mbit=four)


def grid_view(**how: object) -> RunView:
    made = [event for step in (1, 2) for event in (costs(step, **how), done(step))]  # type: ignore[arg-type]
    return view(history(started(), *map(joined, NODES), placed(), made))


def test_every_stage_is_in_its_row() -> None:
    found = grid_view()
    assert [(s.replica, s.stage, s.node_id) for s in found.stages] == [
        (0, 0, NODES[0]), (0, 1, NODES[1]), (1, 0, NODES[2]), (1, 1, NODES[3]),
    ]  # fmt: skip
    assert [stage.blocks for stage in found.stages] == [4, 4, 4, 4]
    assert (found.rows, found.groups) == (2, GROUPS)
    assert [(m.replica, m.stage) for m in found.members] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert RunView.from_json(found.to_json()) == found


def test_links_within_a_row_and_between_rows_are_apart() -> None:
    found = grid_view()
    ends = {(one.source_replica, one.source, one.target_replica, one.target) for one in found.links}
    assert ends == {(0, 0, 0, 1), (0, 1, 0, 0), (1, 0, 1, 1), (1, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 0)}
    row = found.row(1)
    assert [one.node_id for one in row.stages] == list(NODES[2:])
    assert len(row.links) == 2 and row.microbatches == found.microbatches // 4


def test_a_builder_goes_on_with_its_rows() -> None:
    builder = RunViewBuilder()
    events_so_far = history(started(), *map(joined, NODES), placed(), [costs(1), done(1)])
    for at, event in events_so_far:
        builder.apply(event, at)
    again = copy(builder)
    assert again.view() == builder.view()


def test_costs_are_taken_apart_by_row() -> None:
    one = costs(1)
    assert [stage.node_id for stage in row_costs(one, 1).stages] == list(NODES[2:])
    assert {(link.source, link.target) for link in row_costs(one, 1).links} == {(0, 1), (1, 0)}
    up, down = mbit_by_stage(one)
    assert up == down == (16.0, 8.0, 16.0, 8.0)
    seconds = group_seconds(one, [3, 1], 2)
    assert seconds[NODES[0]] == pytest.approx(2 / 7) and seconds[NODES[2]] == pytest.approx(0.6 * 2 / 3)
    assert {*group_seconds(one, [0, 1], 2)} == {*NODES[2:]}
    assert Place(0, 1) < Place(1, 0)


def test_the_row_that_ends_last_is_named_with_what_limits_it() -> None:
    words = bottleneck(grid_view(), {})
    assert words[0].startswith(
        "row 0 ends its 3 groups last: row 1 waits 40 % of the time for its gradients; "
    )
    assert "stage" in words[0]


def test_a_step_that_all_rows_spend_on_summing_is_named() -> None:
    words = bottleneck(grid_view(sync=(0.3, 0.3), size=3_900_000), {})
    assert words[0].startswith("all rows sum their gradients 30 % of the time after their last microbatch; ")
    assert "the link of stage 0 from row 0 to 1 is full" in words[0] and "sync_codec" in words[0]
