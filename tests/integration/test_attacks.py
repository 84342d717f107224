"""Attacks on real runs: they end with an undisturbed run's bits and all honest members.

Each lie comes from a stage, and from a step on, that a seed says; `test_machine_liars.py` has all of them.
`make attack` measures every lie, and sieges at full size.
"""

from pathlib import Path

import pytest

from tests.support.attacks import MEMBERS, Attack, anywhere, attack
from tests.support.fault_prefork import Prefork
from tests.support.strangers import SIEGES, Siege, besiege

SEED = 21
SAYS = {
    "nan": "as another node found; it gets a stage again only if no other node is left",
    "not-finite": "as another node found; it gets a stage again only if no other node is left",
    "huge-norm": "as another node found; it gets a stage again only if no other node is left",
    "negative-norm": "quarantined: a squared norm cannot be -1.0",
    "norms-of-others": "quarantined: its vote names layer units",
    "flood-heartbeats": "quarantined: a heartbeat of",
    "flood-spans": "spans",
    "accuse-one": "a spare takes stage",
    "accuse-both": "a spare takes stage",
    "internal": "a spare takes stage",
    "blame-link": "a spare takes stage",
    "idle": "it did nothing in step",
    "wrong-activations": "two others did not get the same",
    "wrong-gradients": "two others did not get the same",
    "withhold-layers": "it did not hand in its layers of step",
}
"""What the operator reads about the liar."""
SIEGES_HERE = [siege for siege in SIEGES if siege.name == "idle-join"]

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("lie", [lie for lie in MEMBERS if lie.name in SAYS], ids=lambda lie: lie.name)
def test_a_member_that_lies(tmp_path: Path, prefork: Prefork, lie: Attack) -> None:
    chosen = anywhere(lie, SEED)
    seen = attack(chosen, tmp_path, launch=prefork.popen)
    assert seen.good(chosen), (chosen, seen)
    assert SAYS[lie.name] in seen.line, (chosen, seen)


@pytest.mark.parametrize("siege", SIEGES_HERE, ids=lambda one: one.name)
def test_strangers_at_a_port(tmp_path: Path, prefork: Prefork, siege: Siege) -> None:
    withstood = besiege(siege, tmp_path, launch=prefork.popen)
    assert withstood.good and withstood.reached >= siege.idle, withstood
