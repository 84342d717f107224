"""Attacks on real runs: they end with an undisturbed run's bits and all honest members.

Each lie comes from a stage, and from a step on, that a seed says; `test_machine_liars.py` has all of them.
`make attack` measures every lie, and sieges at full size.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.attacks import MEMBERS, Attack, anywhere, attack
from tests.support.fault_prefork import Prefork
from tests.support.strangers import SIEGES, Siege, besiege

SEED = 21
FOUND = "as another node found; it gets a stage again only if no other node is left"
SAYS = {
    "nan-once": FOUND,
    "nan": FOUND,
    "not-finite": FOUND,
    "huge-norm": FOUND,
    "internal": "a spare takes stage",
    "accuse-one": "a spare takes stage",
    "accuse-both": "a spare takes stage",
    "blame-link": "a spare takes stage",
    "negative-norm": "quarantined: a squared norm cannot be -1.0",
    "huge-loss": "quarantined: it voted with a loss",
    "norms-of-others": "quarantined: its vote names layer units",
    "flood-heartbeats": "quarantined: a heartbeat of",
    "flood-spans": "quarantined: more spans than steps can have",
    "no-vote": "it did not end step",
    "no-applied": "it did not end step",
    "idle": "it did nothing in step",
    "withhold-layers": "it did not hand in its layers of step",
    "silent": "it has been silent for more than",
    "reconnect": "its connection closed and did not come back",
    "wrong-activations": "two others did not get the same",
    "wrong-gradients": "two others did not get the same",
    "wrong-no-spare": "two others did not get the same",
}
"""What the operator reads about the liar."""
SIEGES_HERE = [replace(siege, calm_seconds=0.2) for siege in SIEGES]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("lie", MEMBERS, ids=lambda lie: lie.name)
def test_a_member_that_lies(tmp_path: Path, prefork: Prefork, lie: Attack) -> None:
    chosen = anywhere(lie, SEED)
    seen = attack(chosen, tmp_path, launch=prefork.popen, hasty=True)
    assert seen.good, (chosen, seen)
    assert SAYS[lie.name] in seen.line, (chosen, seen)


@pytest.mark.timeout(600)  # it starts six processes, most of them one after the other
@pytest.mark.parametrize("siege", SIEGES_HERE, ids=lambda one: one.name)
def test_strangers_at_a_port(tmp_path: Path, prefork: Prefork, siege: Siege) -> None:
    withstood = besiege(siege, tmp_path, launch=prefork.popen)
    assert withstood.good and withstood.reached >= siege.idle, withstood
