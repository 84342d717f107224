"""How scripts word an exception: its class and message, one line, no longer than asked."""

import pytest

from scripts.report import MOST_CHARACTERS, one_line


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (ValueError("no such shape"), "ValueError: no such shape"),
        (RuntimeError("\n  at 3:7:\n\tx = tl.dot(a, b)\n"), "RuntimeError: at 3:7: x = tl.dot(a, b)"),
        (KeyError(), "KeyError"),
        (TimeoutError(" \n"), "TimeoutError"),
    ],
)
def test_an_exception_is_one_line(problem: BaseException, line: str) -> None:
    assert one_line(problem) == line


def test_a_long_message_is_cut() -> None:
    problem = ValueError("word " * 1000)
    assert len(one_line(problem)) == MOST_CHARACTERS
    assert one_line(problem, 21) == "ValueError: word word"
