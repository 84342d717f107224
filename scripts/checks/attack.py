"""Attack real runs, and record what their honest members see.

    make attack                                   every false message by a member, every flood by strangers
    make attack ATTACK_ARGS="--only nan,no-vote"  some of them; replaces their rows of the record
    make attack ATTACK_ARGS=--small               sieges of a few seconds, as in CI
    make attack ATTACK_ARGS="--rounds 3"          sieges of three minutes
    make attack ATTACK_ARGS="--states 100"        only so many seeds of simulated lies about the state

Writes scripts/results/attack.json; `python -m scripts.checks.faults --render` puts it into deploy/FAULTS.md.
Exit code 1 if a run was harmed.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from node.lab.results import commit
from scripts.report import RESULTS, write
from tests.support.attacks import MEMBERS, Attack, attack
from tests.support.fault_prefork import Prefork
from tests.support.state_attacks import STATE_LIES, StateSeen, attack_state
from tests.support.strangers import ROUNDS, SIEGES, Siege, at_full_size, besiege
from wire.version import VERSION

VARIANTS = tuple(
    replace(siege, name=f"{siege.name}-{rate}", joins_a_second=rate)
    for siege in SIEGES
    if siege.joins_a_second
    for rate in (50, 237, 1600)
)
"""Sieges at other rates."""
STRANGERS = (*SIEGES, *VARIANTS)
Row = dict[str, Any]
RECORD = RESULTS / "attack.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Attack real runs, and record what their honest members see."
    )
    parser.add_argument("--only", default="", help="names of attacks, separated by commas")
    parser.add_argument("--small", action="store_true", help="sieges of seconds, not of minutes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="minutes of each siege")
    parser.add_argument("--states", type=int, default=0, metavar="N", help="seeds of simulated lies")
    args = parser.parse_args(argv)
    if args.states:
        return _states(args.states)
    wanted = set(filter(None, args.only.split(",")))
    names = {one.name for one in (*MEMBERS, *STRANGERS)}
    if unknown := wanted - names:
        parser.error(f"no such attack: {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    torch.set_num_threads(1)
    rows = {"members": _earlier("members"), "strangers": _earlier("strangers")}
    with Prefork() as prefork:
        for one in (*MEMBERS, *STRANGERS):
            if wanted and one.name not in wanted:
                continue
            with tempfile.TemporaryDirectory(prefix="thinwire-attack-") as directory:
                kind, row = _row(one, Path(directory), prefork, rounds=0 if args.small else args.rounds)
            print(json.dumps(row), flush=True)
            rows[kind][one.name] = row
            report = {
                kind: [rows[kind][one.name] for one in known if one.name in rows[kind]]
                for kind, known in (("members", MEMBERS), ("strangers", STRANGERS))
            }
            write(RECORD, {"version": VERSION, "cores": os.cpu_count(), **report})
    return int(any(not row["withstood"] for table in rows.values() for row in table.values()))


def _states(seeds: int) -> int:
    """Lies about the state against the run's state machine; writes scripts/results/state_attacks.json, anew
    after each seed."""
    kinds = [(lie, rows, audits) for lie in STATE_LIES for rows in (2, 3, 4) for audits in (False, True)]
    found: dict[tuple[str, int, bool], list[StateSeen]] = {kind: [] for kind in kinds}
    table: list[Row] = []
    at = commit()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for seed in range(seeds):
            for kind, seen in zip(kinds, pool.map(_state, kinds, repeat(seed)), strict=True):
                found[kind].append(seen)
            table = [_state_row(*kind, found[kind]) for kind in kinds]
            bad = [f"{row['lie']}, {row['rows']} rows" for row in table if not row["withstood"]]
            print(f"seed {seed}: {'; '.join(bad) or 'all withstood'}", flush=True)
            write(RESULTS / "state_attacks.json", {"version": VERSION, "commit": at, "rows": table})
    return int(not all(row["withstood"] for row in table))


def _state(kind: tuple[str, int, bool], seed: int) -> StateSeen:
    lie, rows, audits = kind
    return attack_state(lie, rows, audits=audits, seed=seed)


def _state_row(lie: str, rows: int, audits: bool, found: Sequence[StateSeen]) -> Row:
    lied = [one for one in found if one.lied]
    return {
        "lie": lie,
        "rows": rows,
        "audits": audits,
        "seeds": len(found),
        "lied": len(lied),
        "ended_right": sum(one.ended for one in lied),
        "named": sum(one.named for one in lied),
        "most_steps_until_named": max((one.steps for one in lied if one.in_minority), default=-1),
        "withstood": all(one.good for one in found),
    }


def _row(one: Attack | Siege, directory: Path, prefork: Prefork, *, rounds: int) -> tuple[str, Row]:
    if isinstance(one, Siege):
        siege = at_full_size(one, rounds) if rounds else one
        withstood = besiege(siege, directory, launch=prefork.popen)
        size = {
            "idle": siege.idle,
            "idle_a_second": siege.idle_a_second,
            "seconds": siege.seconds,
            "rounds": siege.rounds,
            "calm_seconds": siege.calm_seconds,
        }
        return "strangers", {**asdict(withstood), **size, "withstood": withstood.good, "commit": commit()}
    seen = attack(one, directory, launch=prefork.popen)
    return "members", {**asdict(seen), "withstood": seen.good, "commit": commit()}


def _earlier(kind: str) -> dict[str, Row]:
    """The rows of the record, by name."""
    if not RECORD.exists():
        return {}
    return {row["name"]: row for row in json.loads(RECORD.read_text(encoding="utf-8"))[kind]}


if __name__ == "__main__":
    sys.exit(main())
