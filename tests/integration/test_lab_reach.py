"""Real runs between machines behind NAT, firewalls and proxies, in namespaces with nftables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.lab import namespaces, tools
from node.lab.reach import reach_table
from tests.support.paths import python_path
from wire.errors import UserError

SECONDS = 220.0
PROFILE = """
[reach]
name = "hard"
kinds = ["open", "symmetric", "proxy"]
[run]
steps = 12
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

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    try:
        tools.tool("nft")
        namespaces.working_flags()
    except UserError as error:
        pytest.skip(f"no laboratory of NAT can be built here: {error}")


def test_a_symmetric_nat_and_a_proxy_train_the_weights_of_open_machines(tmp_path: Path) -> None:
    """The hardest pair: neither can be dialled, one keeps no port, and the other sends no packet itself."""
    profile = tmp_path / "hard.toml"
    profile.write_text(PROFILE)
    command = [sys.executable, "-m", "node.cli.main", "lab", "run", str(profile), "--only", "symmetric-proxy"]
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
    assert [row["pair"] for row in found["pairs"]] == [["open", "open"], ["symmetric", "proxy"]]
    assert reach_table(found)[1:] == [
        ["open", "direct", "-", "-"],
        ["symmetric", "-", "-", "relay"],
        ["proxy", "-", "relay", "-"],
    ]
