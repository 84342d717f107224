"""What steps cost, from totals that nodes report: differences, fresh totals, sums that only grow."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.coordinator.accounting import CLOCK_RATIO, FASTEST, SLACK_SECONDS, Accounting, Answers
from node.coordinator.reports import NO_REPORT, is_continued, longest_kind
from node.telemetry.clock import TimeKind
from node.telemetry.costs import OTHER_CODEC, Ledger, bits_per_element, idle_by_stage, mbit_by_stage, summed
from tests.support.totals import EPOCH, totals
from wire.figures import FlowFigures, Place, flow_sum
from wire.messages import Begin, Commit, Finish, Heartbeat
from wire.messages_proto import node_message_from_proto, node_message_to_proto
from wire.spec import Direction
from wire.telemetry import Telemetry

SEATS = ("a", "b")


def sent(report: Telemetry) -> Telemetry:
    """As the coordinator reads it."""
    message = node_message_from_proto(node_message_to_proto(Heartbeat(telemetry=report, sent_at=1.0)))
    assert isinstance(message, Heartbeat)
    return message.telemetry


def link_bytes(ledger: Ledger) -> int:
    return sum(link.bytes for link in ledger.links.values())


def accounting() -> Accounting:
    return Accounting({"tah", "fixed-8"})


def report(books: Accounting, steps: float, epoch: int = EPOCH) -> None:
    for stage, node in enumerate(SEATS):
        books.report(node, totals(steps, stage=stage, epoch=epoch))


def began(books: Accounting, steps: float = 0) -> None:
    report(books, steps)
    books.begin_epoch(EPOCH, SEATS)


def test_a_node_that_says_that_it_spent_more_than_passed_is_not_believed() -> None:
    books = accounting()
    began(books, steps=10)
    lie = replace(
        totals(11), wall_seconds=1e8, seconds={"forward": 3e8, "backward": 1e8, "wait-upstream": -1.0}
    )
    lie = replace(lie, links=tuple(replace(link, busy_seconds=9e8) for link in lie.links))
    books.report("a", lie, 4.0)
    books.report("b", totals(11, stage=1), 4.0)
    costs = books.step(7, seconds=4.0)
    liar, honest = costs.stages
    assert liar.wall_seconds == pytest.approx(4.0 * CLOCK_RATIO)
    assert (liar.seconds["forward"], liar.seconds["backward"]) == (liar.wall_seconds, 0.0)
    assert all(0 <= seconds <= liar.wall_seconds for seconds in liar.seconds.values())
    assert costs.links[0].busy_seconds == liar.wall_seconds
    assert (honest.wall_seconds, honest.seconds["forward"]) == (2.0, 1.0)
    # It is counted from there, not from its lie.
    books.report("a", replace(lie, wall_seconds=1e9), 6.0)
    (again, _) = books.step(8, seconds=2.0).stages
    assert again.wall_seconds == pytest.approx(2.0 * CLOCK_RATIO)


@pytest.mark.parametrize("of", ["bytes", "retransmits", "rejects", "flow bytes", "flow elements"])
def test_a_node_that_says_that_it_sent_more_than_any_can_is_not_believed(of: str) -> None:
    """Not in one report, nor in many, with links that it claims to have reopened or that it names twice."""
    books = accounting()
    began(books, steps=10)
    nothing = replace(totals(0).links[0], flows=())
    if of.startswith("flow"):
        flow = FlowFigures(direction=Direction.ACTIVATION, codec="tah", bytes=0, elements=0)
        flow = replace(flow, **{of[5:]: 10**18})
        link = replace(nothing, flows=(flow, replace(flow, direction=Direction.GRADIENT)))
    else:
        link = replace(nothing, **{of: 10**18})
    for _ in range(20):
        books.report("a", replace(totals(11), links=(link, link)), 4.0)
        books.report("a", replace(totals(11), links=(nothing,)), 4.0)
    books.report("b", totals(11, stage=1), 4.0)
    there, back = books.step(7, seconds=4.0).links
    most = FASTEST * (4.0 + SLACK_SECONDS)
    assert max(there.bytes, there.retransmits, back.rejects) <= most
    assert sum(flow.bytes for flow in there.flows) <= most
    assert sum(flow.elements for flow in there.flows) <= 8 * most
    assert back.bytes == 1000
    # Of what is possible everything counts, in the next epoch, too.
    books.report("b", totals(12, stage=1), 5.0)
    assert books.step(8, seconds=1.0).links[-1].bytes == 1000
    books.report("a", totals(0, epoch=EPOCH + 1), 6.0)
    books.begin_epoch(EPOCH + 1, SEATS)
    books.report("a", totals(1, epoch=EPOCH + 1), 0.1)
    assert books.step(9, seconds=1.0).links[0].bytes == 1000


def test_a_step_costs_the_difference_of_totals() -> None:
    books = accounting()
    began(books, steps=10)  # what came before the epoch was ready is nobody's step
    books.report("a", totals(11))
    books.report("b", totals(12, stage=1))
    costs = books.step(7, seconds=4.0)
    assert (costs.step, costs.seconds, costs.aborted) == (7, 4.0, False)
    assert idle_by_stage(costs) == (0.25, 0.25)
    assert mbit_by_stage(costs) == (pytest.approx((0.002, 0.004)), pytest.approx((0.004, 0.002)))
    assert bits_per_element(costs, "activation") == bits_per_element(costs, "gradient") == 8 * 900 / 1600
    assert bits_per_element(costs, "tied_sum") == 0.0
    there, back = costs.links
    assert (there.source, there.target, there.bytes, there.busy_seconds) == (0, 1, 1000, 0.5)
    assert (back.source, back.target, back.bytes, back.retransmits) == (1, 0, 2000, 4)
    assert (there.capacity, there.round_trip_seconds, there.queued_bytes) == (5000.0, 0.01, 7)
    assert link_bytes(books.run) == 3000
    assert flow_sum(books.run.links.values(), "activation").elements == 1600
    assert costs.stages[0].memory_bytes == 5000 and costs.stages[1].node_id == "b"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("direct",) * 2,
        ("relay",) * 2,
        ("relay node-cccccccccc",) * 2,
        ("relay owned", ""),
        ("relay relay", ""),
        ("", ""),
        ("owned", ""),
    ],
)
def test_a_link_costs_by_the_path_that_its_sender_names(said: str, shown: str) -> None:
    books = accounting()
    began(books)
    now = totals(1)
    books.report("a", replace(now, links=tuple(replace(link, path=said) for link in now.links)))
    assert [link.path for link in books.step(1, seconds=2.0).links if link.source == 0] == [shown]


def test_damaged_frames_are_those_of_the_link_that_they_came_over() -> None:
    books = accounting()
    began(books)
    books.report("b", totals(1, stage=1, rejects=3))
    costs = books.step(1, 2.0)
    assert {(link.source, link.target): link.rejects for link in costs.links} == {(0, 1): 3, (1, 0): 0}


@pytest.mark.parametrize("afresh", [0.0, 0.5])
def test_restarted_totals_count_from_zero(afresh: float) -> None:
    books = accounting()
    began(books)
    report(books, 3)
    books.step(1, 2.0)
    before = link_bytes(books.run)
    report(books, afresh)
    costs = books.step(2, 2.0)
    assert link_bytes(books.run) == before + 2 * 1000 * afresh
    assert min(link.bytes for link in costs.links) >= 0
    assert min(stage.wall_seconds for stage in costs.stages) >= 0


def test_costs_of_another_epoch_count_for_no_step() -> None:
    books = accounting()
    began(books)
    report(books, 1)
    books.step(1, 2.0)
    report(books, 50, epoch=EPOCH - 1)
    report(books, 60, epoch=EPOCH + 1)
    assert books.step(2, 2.0).links == ()
    books.begin_epoch(EPOCH + 1, SEATS)
    report(books, 61, epoch=EPOCH + 1)
    assert [link.bytes for link in books.step(2, 2.0).links] == [1000, 1000]
    assert link_bytes(books.run) == 4000


def test_a_stage_that_changes_hands_keeps_its_time() -> None:
    books = accounting()
    began(books)
    report(books, 1)
    books.step(1, 2.0)
    books.forget("b")
    books.report("c", totals(0, stage=1, epoch=EPOCH + 1))
    books.begin_epoch(EPOCH + 1, ("a", "c"))
    books.report("c", totals(1, stage=1, epoch=EPOCH + 1))
    books.step(2, 2.0)
    times = books.stage_times()[1]
    assert (times.node_id, times.wall_seconds) == ("c", 4.0)


def test_invented_kinds_codecs_and_neighbours_use_no_memory() -> None:
    books = accounting()
    began(books)
    for step in range(50):
        told = totals(step, codec=f"codec {step}")
        links = (
            *told.links,
            replace(told.links[0], target=step + 2),
            replace(told.links[0], target=0),
        )
        books.report("a", replace(told, seconds={f"kind {step}": 1.0}, links=links))
        books.report(f"stranger {step}", told)
        costs = books.step(step, seconds=0.0)
    assert mbit_by_stage(costs) == ((0.0, 0.0), (0.0, 0.0))
    assert len(books.stage_times()[0].seconds) == len(TimeKind)
    there, back = Place(0, 0), Place(0, 1)
    assert books.run.links.keys() == {(there, back), (back, there)}
    assert {flow.codec for flow in books.run.links[there, back].flows} == {OTHER_CODEC}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.integers(EPOCH - 1, EPOCH + 1),
            st.floats(0, 100),
            st.sampled_from(["report", "step", "abort", "begin"]),
        ),
        max_size=40,
    )
)
def test_sums_only_grow_and_steps_add_up_to_them(moves: list[tuple[int, int, float, str]]) -> None:
    books = accounting()
    began(books)
    told, last = 0, (0, 0.0, 0)
    for stage, epoch, steps, move in moves:
        if move == "report":
            books.report(SEATS[stage], totals(steps, stage=stage, epoch=epoch))
        elif move == "begin":
            told += sum(link.bytes for link in books.step(1, 1.0).links)
            books.begin_epoch(epoch, SEATS)
        else:
            told += sum(link.bytes for link in books.step(1, 1.0, aborted=move == "abort").links)
        ledger = books.run
        now = (
            link_bytes(ledger),
            sum(stage.wall_seconds for stage in ledger.stages.values()),
            sum(link.retransmits for link in ledger.links.values()),
        )
        assert all(new >= old for new, old in zip(now, last, strict=True))
        last = now
    told += sum(link.bytes for link in books.step(1, 1.0).links)
    assert told == link_bytes(books.run)


def test_costs_of_steps_that_follow_each_other_are_added() -> None:
    books = accounting()
    began(books)
    report(books, 1)
    first = books.step(1, 2.0)
    report(books, 3)
    second = books.step(2, 4.0)
    both = summed(first, second)
    assert both is not None
    assert (both.step, both.seconds) == (2, 6.0)
    assert [stage.wall_seconds for stage in both.stages] == [6.0, 6.0]
    assert [link.bytes for link in both.links] == [3000, 3000]
    assert bits_per_element(both, "activation") == bits_per_element(first, "activation")
    assert summed(replace(first, aborted=True), second) is None
    assert summed(both, replace(second, stages=second.stages[:1])) is None


def test_reports_and_costs_have_the_fields_of_their_classes_in_order() -> None:
    """They are made without their classes' own `__init__`; the history has the fields in this order."""
    books = accounting()
    for stage, node in enumerate(SEATS):
        books.report(node, sent(totals(1, stage=stage)))
    books.begin_epoch(EPOCH, SEATS)
    for stage, node in enumerate(SEATS):
        books.report(node, sent(totals(2, stage=stage)))
    costs, report = books.step(1, 2.0), books.newest["a"]
    assert report == totals(2)
    every = [report, *report.links, *report.links[0].flows]
    for one in (*every, *costs.stages, *costs.links, *costs.links[0].flows):
        assert list(vars(one)) == [field.name for field in fields(one)]
        assert replace(one) == one


def test_a_node_waited_for_votes_until_the_last_answer_came() -> None:
    answers = Answers()
    commit = Commit(epoch=1, step=4, clip_coefficient=1.0, lr=0.1)
    for node, at in (("a", 10.0), ("b", 14.0), ("c", 14.5)):
        answers.came(node, at)
    assert [answers.waited(node, commit) for node in "abc"] == [4.5, 0.5, 0.0]
    answers.came("a", 20.0)
    begin = Begin(epoch=1, step=5)
    assert answers.waited("b", begin) == 6.0
    # One that has not answered yet has not waited, and other messages say nothing of it.
    assert answers.waited("d", begin) == 0.0
    assert answers.waited("b", Finish(reason="over", failed=False)) is None


# ---- totals of one node that are compared


def test_what_grew_most_between_two_reports() -> None:
    assert longest_kind(totals(1), totals(2)) == longest_kind(NO_REPORT, totals(1)) == "forward"
    assert longest_kind(totals(2), totals(2)) == longest_kind(totals(1), totals(0.5)) == ""
    later = totals(0.5, epoch=EPOCH + 1)
    assert longest_kind(totals(1), later) == "forward", "totals begin at 0 with an epoch"


def test_a_report_goes_on_unless_links_were_opened_again_or_have_other_codecs() -> None:
    assert is_continued(totals(1), totals(2))
    for other in (totals(0.5), totals(2, epoch=EPOCH + 1), totals(2, codec="fp32"), NO_REPORT):
        assert not is_continued(totals(1), other)
