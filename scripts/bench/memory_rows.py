"""The estimates of recorded plans against what a GPU took: `python -m scripts.bench.memory_rows`.

For every way of `memory_plan.json` that was measured (scripts/bench/memory_plan.py) it estimates, by the code
as it is, the memory of the plan that was measured. The estimate of tensors must be at least their measured
peak and at most 5 % above it. With the pages that an allocator which is short holds beside them it is
compared with what the allocator had reserved: that may be more than a stage needs, since an allocator which
is not short keeps what is free in between.
Fails if a way is beyond these limits. Needs no GPU.
"""

import argparse
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.config.schema import RunConfig, StorageSection
from node.lab.results import commit
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import Choice, _stages
from node.tuning.state_moves import Moved
from scripts.bench.memory_plan import GB, HOST_GB, LENGTHS, STAGE, STAGES, run_file
from scripts.report import RESULTS, write

MEASURED = RESULTS / "memory_plan.json"
OUT = RESULTS / "memory_rows.json"
LEAST, MOST = 1.0, 1.05
"""Of the estimate of tensors over their peak."""
BLOCKS = 8
OURS = ("plan", "plan, few bits", "plain", "again", "agoq", "compact")
"""Ways whose tensors are the stage's own."""
EVERYTHING = "everything kept"
_BITS = re.compile(r"(\w+) in (\d+) bits")
_COUNT = re.compile(r"(\d+) of \d+ blocks: (.*)")
_STATE = re.compile(r"(weights|gradients|codes) of (\d+) of \d+ blocks in host memory")


def choice(words: str) -> Choice:
    """What `str(Choice)` says."""
    if words.startswith("computed again in backward"):
        return Choice.INPUT_MOVED if "host memory" in words else Choice.AGAIN
    parts = words.split(", ")
    return Choice(
        recomputed=tuple(part.removesuffix(" again") for part in parts if part.endswith(" again")),
        moved=tuple(part.removesuffix(" in host memory") for part in parts if part.endswith("host memory")),
    )


def parsed(text: str) -> tuple[Counter[Choice], Moved]:
    """How many blocks do what, and which state moves, from `MemoryPlan.text`."""
    counts, state = Counter[Choice](), Moved()
    for part in text.split("; ") if text != EVERYTHING else ():
        if found := _COUNT.fullmatch(part):
            counts[choice(found[2])] += int(found[1])
        elif found := _STATE.fullmatch(part):
            state = state._replace(**{found[1]: int(found[2])})
        elif part == "the optimizer's moments in host memory":
            state = state._replace(moments=1)
        else:
            raise ValueError(f"{part!r} is no part of a plan's text")
    counts[Choice.KEPT] += BLOCKS - counts.total()
    return counts, state


def run_of(tokens: str, way: str, found: dict[str, Any]) -> RunConfig:
    """The run that was measured this way."""
    samples, length = LENGTHS[tokens]
    if way in ("agoq", "compact"):
        return run_file(samples, length, preset=way)
    config = run_file(samples, length)
    if way != "plan, few bits" or found["storage"] == "all as computed":
        return config
    bits: dict[str, Any] = dict(_BITS.findall(found["storage"]))
    return replace(config, storage=StorageSection(**bits))


def compared(tokens: str, way: str, text: str, found: dict[str, Any]) -> dict[str, Any]:
    """One way that was measured, with its estimates: bytes of tensors, and with the allocator's pages."""
    config = run_of(tokens, way, found)
    devices = Devices(on_cpu=False, host_bytes=HOST_GB * GB, has_own_attention=True)
    (one,) = _stages(config, STAGES, devices, only=STAGE)
    counts, state = parsed(text)
    missing = [str(each) for each in counts if counts[each] and each not in one.columns]
    if missing:
        raise ValueError(f"{tokens}, {way}: no plan treats a block so now: {', '.join(missing)}")
    memory = one.plan(one.order([[counts[each] for each in one.columns]]), state=state).memory
    samples, length = LENGTHS[tokens]
    # Of what a node has on the way from and to its links the bench has the input and the gradient.
    whole = memory.total - memory.fixed + 2 * 4 * samples * length * config.model.hidden
    tensors = whole - memory.pages
    return {
        "tokens": tokens,
        "way": way,
        "plan": text,
        "storage": found.get("storage", ""),
        "estimate_of_tensors": tensors,
        "estimate": whole,
        "peak": found["peak_bytes"],
        "reserved": found["reserved_bytes"],
        "tensors_over_peak": tensors / found["peak_bytes"],
        "over_reserved": whole / found["reserved_bytes"],
    }


def every_way(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`compared` of all that were measured, those of a later planner too."""
    for row in report["rows"]:
        for part in (row, row.get("planner_after")):
            for way, found in part["ways"].items() if part else ():
                if way in OURS and "peak_bytes" in found:
                    text = EVERYTHING
                    if way.startswith("plan"):
                        text = found.get("plan", part["plan"])
                    elif way == "again":
                        text = f"{BLOCKS} of {BLOCKS} blocks: {Choice.AGAIN}"
                    yield {"gb": row["gb"], **compared(row["tokens"], way, text, found)}


def beyond(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those outside the limits."""
    return [
        row for row in rows if not LEAST <= row["tensors_over_peak"] <= MOST or row["over_reserved"] > MOST
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = list(every_way(json.loads(args.measured.read_text(encoding="utf-8"))))
    for row in rows:
        ratios = (
            f"{row['tensors_over_peak']:.4f} of the peak, {row['over_reserved']:.4f} of the reserved memory"
        )
        sys.stdout.write(f"{row['tokens']:9} {row['gb']:2} GB  {row['way']:14}  {ratios}\n")
    found = {
        key: {"least": min(row[key] for row in rows), "most": max(row[key] for row in rows)}
        for key in ("tensors_over_peak", "over_reserved")
    }
    report = {"commit": commit(), "python": platform.python_version(), "summary": found, "rows": rows}
    write(args.out, report)
    wrong = beyond(rows)
    sys.stdout.write(f"{len(rows)} ways, {len(wrong)} beyond the limits\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
