"""The laboratory of NAT and firewalls: its profile, its plan of sites, its table."""

import json
from pathlib import Path
from typing import Any

import pytest

from node.lab.access import INTERNET, KINDS, lay_out_sites, moves
from node.lab.reach import (
    FORMAT,
    is_reach_profile,
    load_reach_profile,
    names_of,
    reach_table,
    read_reach_results,
)
from wire.errors import ConfigError

NAT = Path(__file__).parents[4] / "deploy" / "lab" / "nat.toml"


def test_the_profile_we_ship_joins_every_two_kinds() -> None:
    assert is_reach_profile(NAT) and not is_reach_profile(NAT.with_name("smoke.toml"))
    profile = load_reach_profile(NAT)
    assert profile.reach.kinds == tuple(KINDS)
    assert len(profile.pairs) == len(KINDS) * (len(KINDS) + 1) // 2
    assert profile.pairs[0] == ("open", "open")
    assert names_of(("nat", "ipv6")) == ("nat-ipv6", "ipv6-nat", "nat", "ipv6")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[reach]\nkinds = ["open", "nta"]', "unknown kind 'nta'; did you mean 'nat'"),
        ('[reach]\nkinds = ["nat", "open"]', 'must begin with "open"'),
        ('[reach]\nkinds = ["open", "nat", "nat"]', "name each kind once"),
        ("[reach]\nkind = []", "unknown key 'kind' in \\[reach\\]; did you mean 'kinds'"),
        ("[reach]\nrun_seconds = 0.0", "must be above 0"),
        ("[reach]\n[[sweep]]\n", "unknown section \\[sweep\\]"),
        ("[reach]\n[pipeline]\nstages = 3", "a pair has two nodes"),
    ],
)
def test_a_wrong_profile_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        load_reach_profile(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_uses_its_own_namespaces_and_addresses(kind: str) -> None:
    """So that two of one kind, and the coordinator, do not meet on the way."""
    sites = lay_out_sites([kind, kind])
    names = [name for site in sites for name in site.namespaces]
    assert len(set(names)) == len(names)
    addresses = [
        (namespace, arguments[2].partition("/")[0])
        for site in sites
        for namespace, program, arguments in site.commands
        if program == "ip" and arguments[:2] == ("address", "add")
    ]
    assert len({address for _, address in addresses}) == len(addresses)
    for site in sites:
        used = {namespace for namespace, _, _ in site.commands} | {place for place, _, _ in site.settings}
        assert used <= {*site.namespaces, INTERNET, ""}
        assert {command[0] for command in moves(site)} == {f"router{site.number}"}


def test_the_table_shows_each_pair_both_ways(tmp_path: Path) -> None:
    def pair(one: str, other: str, **changes: Any) -> dict[str, Any]:
        return {"pair": [one, other], "path": "direct", "same_weights": True, "failure": "", **changes}

    values = {
        "format": FORMAT,
        "kinds": {"open": "", "nat": "", "proxy": ""},
        "pairs": [
            pair("open", "open"),
            pair("open", "nat", path="relay"),
            pair("nat", "nat", same_weights=False),
            pair("nat", "proxy", failure="it did not end"),
        ],
    }
    assert reach_table(values) == [
        ["", "open", "nat", "proxy"],
        ["open", "direct", "relay", "-"],
        ["nat", "relay", "other weights", "failed"],
        ["proxy", "-", "failed", "-"],
    ]
    (tmp_path / "results.json").write_text(json.dumps(values))
    assert read_reach_results(tmp_path) == read_reach_results(tmp_path / "results.json") == values
    (tmp_path / "other.json").write_text("{}")
    assert read_reach_results(tmp_path / "other.json") is None
    assert read_reach_results(tmp_path / "missing.json") is None
