"""What scripts/checks/gpu_tests.py records of a JUnit report."""

import subprocess
import sys
from pathlib import Path

from scripts.checks.gpu_tests import summary

MADE = """
import pytest

def test_a_near_link_is_not_named(record_property):
    record_property("largest_relative_difference", 0.00125)

@pytest.mark.parametrize("n", [1])
def test_a_far_link_is_named(n, record_property):
    record_property("largest_relative_difference", 0.5)
    assert n == 2

@pytest.mark.skip(reason="needs more")
def test_more():
    pass
"""


def test_outcomes_and_what_tests_recorded(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_made.py").write_text(MADE)
    path = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={path}", "-o", "junit_family=xunit1"]
    plugins = ["-p", "no:cacheprovider", "-p", "no:asyncio"]
    assert subprocess.run([*command, *plugins], cwd=tmp_path, capture_output=True).returncode == 1
    found = summary([path.read_text(encoding="utf-8")])
    assert found["outcomes"] == {"passed": 1, "failure": 1, "skipped": 1}
    assert found["others"] == {
        "failure": ["test_made::test_a_far_link_is_named[1]"],
        "skipped": ["test_made::test_more"],
    }
    assert found["recorded"] == [
        {
            "test": "test_made::test_a_near_link_is_not_named",
            "outcome": "passed",
            "largest_relative_difference": 0.00125,
        },
        {
            "test": "test_made::test_a_far_link_is_named[1]",
            "outcome": "failure",
            "largest_relative_difference": 0.5,
        },
    ]
