"""Real runs between machines behind NAT, firewalls and proxies, in namespaces with nftables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.lab import namespaces, tools
from node.lab.reach import PATH_CHECKS, reach_table
from tests.support.paths import python_path
from wire.errors import UserError

SECONDS = 300.0
PROFILE = """
[reach]
name = "hard"
kinds = ["open", "nat", "symmetric", "mapping", "proxy"]
[run]
steps = 40
[model]
layers = 2
hidden = 32
heads = 2
kv_heads = 2
ffn = 64
sequence = 32
[training]
global_batch = 8
microbatch = 2
[pipeline]
stages = 2
"""

pytestmark = pytest.mark.timeout(320)


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    try:
        tools.tool("nft")
        namespaces.working_flags()
    except UserError as error:
        pytest.skip(f"no laboratory of NAT can be built here: {error}")


def test_machines_behind_nat_and_a_proxy_train_the_weights_of_open_machines(tmp_path: Path) -> None:
    """Two NATs that keep ports come to a path without a relay. In the hardest pair one NAT has a new port for
    each connection, and the other node sends no packet itself. A router that leads a port inside on request
    makes its node one that others dial. `thinwire doctor` says which NAT it is."""
    profile = tmp_path / "hard.toml"
    profile.write_text(PROFILE)
    command = [sys.executable, "-m", "node.cli.main", "lab", "run", str(profile)]
    command += ["--only", "symmetric-proxy", "--only", "nat-nat", "--only", "symmetric-mapping"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert reach_table(found)[1:] == [
        ["open", "direct", "-", "-", "-", "-"],
        ["nat", "-", "simultaneous open", "-", "-", "-"],
        ["symmetric", "-", "-", "-", "direct", "relay"],
        ["mapping", "-", "-", "direct", "-", "-"],
        ["proxy", "-", "-", "relay", "-", "-"],
    ]
    at_open, at_nat = (
        [row["doctor"][check] for check in PATH_CHECKS] for row in found["pairs"] if row.get("doctor")
    )
    assert at_open[0].startswith("none: ")
    assert at_open[1] == "others can dial this machine"
    assert at_nat[0].startswith("NAT at 198.18.1.2 ") and "every target (2 " in at_nat[0]
    assert "its router forwards no port" in at_nat[1]
    assert at_nat[2].startswith("likely works")
    assert at_nat[3].startswith("the coordinator relays")
