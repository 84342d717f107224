"""Members that keep a real run waiting: it ends with an undisturbed run's bits and all honest members."""

from pathlib import Path

import pytest

from tests.support.attacks import assert_harmless
from tests.support.fault_prefork import Prefork

SEED = 21
SAYS = {
    "no-applied": "it did not end step",
    "idle": "it did nothing in step",
    "withhold-layers": "it did not hand in its layers of step",
}
"""What the operator reads about the liar."""

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("lie", SAYS)
def test_a_member_that_keeps_others_waiting(tmp_path: Path, prefork: Prefork, lie: str) -> None:
    assert_harmless(lie, SEED, SAYS[lie], tmp_path, launch=prefork.popen)
