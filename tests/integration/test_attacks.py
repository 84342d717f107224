"""Members that lie, or keep a run waiting: it ends with an undisturbed run's bits and all honest members.

Each lie comes from a stage, and from a step on, that a seed says. `test_machine_liars.py` has lies in votes
and failures, and `test_sieges.py` strangers. All lies are measured by `make attack`, and sieges at full size.
"""

from pathlib import Path

import pytest

from tests.support.attacks import assert_harmless
from tests.support.fault_prefork import Prefork

SEED = 21
SAYS = {
    "flood-gateway": "quarantined: a heartbeat of",
    "huge-layers": "67108864",
    "reconnect": "connection",
    "wrong-activations": "two others",
    "zero-layers": "2 other nodes",
    "layer-of-another": "of step",
    "late-layer-of-another": "of step",
    "stored-layer-of-another": "of step",
    "idle": "it did nothing in step",
    "withhold-layers": "it did not hand in its layers of step",
}
"""What the operator reads about the liar."""

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("lie", SAYS)
def test_a_member_that_lies(tmp_path: Path, prefork: Prefork, lie: str) -> None:
    assert_harmless(lie, SEED, SAYS[lie], tmp_path, launch=prefork.popen)
