"""Members that keep a real run waiting: it ends with an undisturbed run's bits and all honest members."""

from pathlib import Path

import pytest

from tests.support.attacks import MEMBERS, anywhere, attack
from tests.support.fault_prefork import Prefork

SEED = 21
SAYS = {
    "no-applied": "it did not end step",
    "idle": "it did nothing in step",
    "withhold-layers": "it did not hand in its layers of step",
    "silent": "it has been silent for more than",
}
"""What the operator reads about the liar."""

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("lie", SAYS)
def test_a_member_that_keeps_others_waiting(tmp_path: Path, prefork: Prefork, lie: str) -> None:
    (known,) = (member for member in MEMBERS if member.name == lie)
    chosen = anywhere(known, SEED)
    seen = attack(chosen, tmp_path, launch=prefork.popen, hasty=True)
    assert seen.good, (chosen, seen)
    assert SAYS[lie] in seen.line, (chosen, seen)
