"""What a volunteer reads: what the node is at before its first step, its speed and rates after it."""

from dataclasses import replace

import pytest

from node.config.schema import CoordinatorSection, DashboardSection, RunConfig
from node.stage.progress import FIRST_STEP, Progress, Reading, page_address

MBIT = 125_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def training() -> tuple[Progress, Clock]:
    """A stage whose steps take 2 s each, half of it computing; it sends 4 Mbit/s and receives 3."""
    clock = Clock()
    progress = Progress(clock)
    progress.joined(5000)
    progress.placed("stage 2 of 4")
    for second in range(13):
        if second == 0 or second % 2:
            progress.step_begins()
        if second % 2 == 0:
            progress.step_done(second // 2)
        progress.read(Reading(computing=second / 2, sent=4 * MBIT * second, received=3 * MBIT * second))
        clock.now += 1.0
    return progress, clock


def test_training_is_told_with_speed_rates_and_time_to_go() -> None:
    progress, _ = training()
    assert progress.line() == (
        "stage 2 of 4",
        "step 6/5000   2 s per step   computing 50%   up 4 down 3 Mbit/s   2h46m to go",
    )


def test_rates_are_those_of_the_newest_seconds() -> None:
    progress, clock = training()
    for _ in range(13):
        progress.read(Reading(computing=6.0, sent=4 * MBIT * 12, received=3 * MBIT * 12))
        clock.now += 1.0
    assert "computing 0%   up 0 down 0 Mbit/s" in progress.line()[1]


def test_before_the_first_step_the_line_says_what_is_waited_for() -> None:
    progress = Progress(Clock())
    assert progress.line() == ("", "")
    progress.doing("compiling codecs")
    assert progress.line() == ("compiling codecs", "")
    progress.placed("stage 0 of 2")
    progress.fetching(3_400_000_000)
    assert progress.line() == ("stage 0 of 2, fetching its state", "")
    progress.came(700_000_000)
    progress.came(500_000_000)
    assert progress.line() == ("stage 0 of 2, fetching its state", "1.2 GB of 3.4 GB")
    progress.step_begins()
    assert progress.line() == (f"stage 0 of 2, {FIRST_STEP}", "")


def test_another_placement_forgets_the_speed_and_keeps_what_was_given() -> None:
    progress, clock = training()
    progress.idle("waiting for the next placement")
    assert progress.line() == ("waiting for the next placement", "")
    progress.placed("stage 0 of 3")
    progress.step_begins()
    assert FIRST_STEP in progress.line()[0]
    progress.step_done(7)
    # Links of the new placement count from 0.
    progress.read(Reading(computing=6.0, sent=MBIT, received=0))
    clock.now += 1.0
    progress.read(Reading(computing=6.5, sent=2 * MBIT, received=0))
    assert progress.line() == ("stage 0 of 3", "step 7/5000   computing 50%   up 1 down 0 Mbit/s")
    assert progress.thanks() == "thank you: 8 steps computed here, 6.12 MB sent, 4.5 MB received"


def test_what_a_machine_gave_before_a_pause_counts() -> None:
    before, _ = training()
    after = Progress(Clock())
    after.goes_on(before)
    assert after.thanks() == before.thanks() == "thank you: 7 steps computed here, 6 MB sent, 4.5 MB received"


def test_who_computed_nothing_is_not_thanked_for_it() -> None:
    assert Progress(Clock()).thanks() == ""


@pytest.mark.parametrize(
    ("listen", "dashboard", "one_port", "expected"),
    [
        ("0.0.0.0:7700", "auto", True, "http://203.0.113.7:7700/"),
        ("0.0.0.0:7700", "auto", False, "http://203.0.113.7:7702/"),
        ("0.0.0.0:0", "auto", False, ""),
        ("0.0.0.0:7700", "", True, ""),
        ("0.0.0.0:7700", "127.0.0.1:8000", True, ""),
        ("0.0.0.0:7700", "0.0.0.0:8000", True, "http://203.0.113.7:8000/"),
    ],
)
def test_the_page_is_named_as_this_machine_reaches_it(
    listen: str, dashboard: str, one_port: bool, expected: str
) -> None:
    config = replace(
        RunConfig(),
        coordinator=CoordinatorSection(listen=listen, one_port=one_port),
        dashboard=DashboardSection(listen=dashboard),
    )
    assert page_address(config, "203.0.113.7:7700") == expected


def test_what_came_before_the_first_step_is_told_once_it_is_over() -> None:
    clock, told = Clock(), list[str]()
    progress = Progress(clock, told.append)
    waits = (
        (lambda: progress.doing("compiling codecs"), 1.0),
        (lambda: progress.doing("testing the device"), 0.04),
        (lambda: progress.idle("waiting for a stage"), 2.0),
        (lambda: progress.placed("stage 0 of 2"), 0.5),
        (lambda: progress.fetching(100), 4.0),
        (progress.step_begins, 3.0),
    )
    for begin, seconds in waits:
        begin()
        clock.now += seconds
    progress.step_done(1)
    progress.step_begins()
    progress.step_done(2)
    (line,) = told
    assert "10.5 s after" in line
    assert line.endswith(
        "compiling codecs 1.0 s, waiting for a stage 2.0 s, taking its stage 0.5 s, "
        f"fetching its state 4.0 s, {FIRST_STEP} 3.0 s"
    )
