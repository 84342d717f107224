"""Fixtures of tests that start processes."""

from collections.abc import Iterator

import pytest

from tests.support.fault_prefork import Prefork


@pytest.fixture(scope="session")
def prefork() -> Iterator[Prefork]:
    """A process that has imported everything, from which others are forked."""
    with Prefork() as template:
        yield template
