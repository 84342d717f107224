"""Strangers besiege a real run: it goes on to the same bits, and members and honest newcomers get in.

The hostile connections of one are idle ones too. `make attack` has all sieges, at full size.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fault_prefork import Prefork
from tests.support.strangers import SIEGES, Siege, besiege

SHORT = [
    replace(siege, calm_seconds=0.2, seconds=1.5, joins_a_second=siege.joins_a_second // 4)
    for siege in SIEGES
    if siege.name != "idle-join"
]


@pytest.mark.timeout(600)  # it starts six processes, most of them one after the other
@pytest.mark.parametrize("siege", SHORT, ids=lambda one: one.name)
def test_strangers_at_a_port(tmp_path: Path, prefork: Prefork, siege: Siege) -> None:
    withstood = besiege(siege, tmp_path, launch=prefork.popen)
    assert withstood.good and withstood.reached >= siege.idle, withstood
