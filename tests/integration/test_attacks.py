"""A member that lies, in real processes: the run ends at its last step with an undisturbed run's bits, and no
honest member leaves. `make attack` measures all lies, and strangers at the ports.
"""

from pathlib import Path

import pytest

from tests.support.attacks import MEMBERS, Attack, attack
from tests.support.fault_prefork import Prefork

HOLD = {"internal", "accuse-both"}

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("lie", [lie for lie in MEMBERS if lie.name in HOLD], ids=lambda lie: lie.name)
def test_a_member_that_lies(tmp_path: Path, prefork: Prefork, lie: Attack) -> None:
    seen = attack(lie, tmp_path, launch=prefork.popen)
    assert seen.good(lie), seen
