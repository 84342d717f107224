"""Triton kernels pass their tests under its interpreter, in a process of their own."""

from pathlib import Path

import pytest

from tests.support.interpreter import SECONDS, Interpreted, needs_triton

FILES = sorted({*Path(__file__).parents[1].rglob("test_*_interpreter.py")} - {Path(__file__)})


@needs_triton
@pytest.mark.timeout(SECONDS + 30)  # the first of a session waits for all files
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_all_tests_of_a_file_pass(file: Path, interpreted: Interpreted) -> None:
    interpreted.passed(file)
