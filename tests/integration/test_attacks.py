"""Attacks on real runs: they end at their last step with an undisturbed run's bits and all honest members.

`test_fault_members.py` has more lies; `make attack` measures all, and sieges at full size.
"""

from pathlib import Path

import pytest

from tests.support.attacks import MEMBERS, Attack, attack
from tests.support.fault_prefork import Prefork
from tests.support.strangers import SIEGES, Siege, besiege

HERE = {"internal", "accuse-both", "blame-link", "idle-join"}

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("lie", [lie for lie in MEMBERS if lie.name in HERE], ids=lambda lie: lie.name)
def test_a_member_that_lies(tmp_path: Path, prefork: Prefork, lie: Attack) -> None:
    seen = attack(lie, tmp_path, launch=prefork.popen)
    assert seen.good(lie), seen


@pytest.mark.parametrize("siege", [siege for siege in SIEGES if siege.name in HERE], ids=lambda one: one.name)
def test_strangers_at_a_port(tmp_path: Path, prefork: Prefork, siege: Siege) -> None:
    withstood = besiege(siege, tmp_path, launch=prefork.popen)
    assert withstood.good and withstood.reached >= siege.idle, withstood
