"""The recorded picture of memory plans: drawn from the recorded rows, with every way that was measured."""

import re

import pytest

pytest.importorskip("matplotlib")
from scripts.docs import plot_memory
from scripts.docs.markdown import read_report


def test_the_recorded_picture_shows_the_recorded_rows() -> None:
    report, drawn = read_report(plot_memory.MEMORY_PLAN), plot_memory.OUT.read_text(encoding="utf-8")
    assert plot_memory.description(report) in drawn, "draw it again: python -m scripts.docs.plot_memory"
    written = re.findall(r"<text[^>]*>([^<]+)</text>", drawn)
    titles = [text for text in written if text.startswith("8 blocks of Llama 8B")]
    assert len(titles) == len(plot_memory.LENGTHS)
    measured = {way for row in report["rows"] for way in plot_memory._measured(row)}
    assert {plot_memory.WAYS[way][1] for way in measured} <= {*written}
