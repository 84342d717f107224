"""A member that hands in another state than the run's, in a world where nodes come and die at random.

Whatever it does, no layer of another state is stored or loaded (`tests/support/machine_world.py` asserts), and
either the run ends with the one right state and without the liar, or it ends by name.
`scripts/checks/attack.py` runs a hundred seeds.
"""

import pytest

from tests.support.state_attacks import STATE_LIES, attack_state

SEEDS = 12


@pytest.mark.parametrize("audits", [False, True])
@pytest.mark.parametrize("rows", [2, 3, 4])
@pytest.mark.parametrize("lie", STATE_LIES)
def test_no_state_but_the_runs_is_stored(lie: str, rows: int, *, audits: bool) -> None:
    for seed in range(SEEDS):
        seen = attack_state(lie, rows, audits=audits, seed=seed)
        assert seen.good, (lie, rows, audits, seed, seen)
