"""Totals of one node that are compared."""

from node.coordinator.reports import NO_REPORT, is_continued, longest_kind
from tests.support.totals import EPOCH, totals


def test_what_grew_most_between_two_reports() -> None:
    assert longest_kind(totals(1), totals(2)) == longest_kind(NO_REPORT, totals(1)) == "forward"
    assert longest_kind(totals(2), totals(2)) == longest_kind(totals(1), totals(0.5)) == ""
    later = totals(0.5, epoch=EPOCH + 1)
    assert longest_kind(totals(1), later) == "forward", "totals begin at 0 with an epoch"


def test_a_report_goes_on_unless_links_were_opened_again_or_have_other_codecs() -> None:
    assert is_continued(totals(1), totals(2))
    for other in (totals(0.5), totals(2, epoch=EPOCH + 1), totals(2, codec="fp32"), NO_REPORT):
        assert not is_continued(totals(1), other)
