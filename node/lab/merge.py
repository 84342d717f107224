"""Results of several invocations as one: parts of a profile that were measured at different times. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from node.lab.plan import CellKey
from node.lab.results import differing, joined_only
from wire.errors import UserError

SAME = ("format", "profile", "profile_sha256", "model", "training", "text", "stages", "device", "seeds")


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All runs and cells of the parts, numbered anew. Of a cell that is in several, the last part's counts.

    Raises UserError for parts of different profiles, machines, commits or ways to delay packets.
    """
    first = parts[0]
    for part in parts[1:]:
        other = [name for name in SAME if part.get(name) != first.get(name)]
        other += [f"machine's {name}" for name in differing(first["machine"], part["machine"])]
        if other:
            raise UserError(
                f"results whose {', '.join(other)} differ are not of one measurement: `lab table` takes them "
                "side by side"
            )
    network = dict(first["network"])
    # A part without any delay did not look for a way to make one.
    methods = {part["network"]["delay_method"] for part in parts} - {"none"}
    if len(methods) > 1:
        raise UserError(f"results with packets delayed by {' and by '.join(sorted(methods))} do not mix")
    network["delay_method"] = methods.pop() if methods else "none"
    runs: list[Mapping[str, Any]] = []
    cells: dict[CellKey, Mapping[str, Any]] = {}
    for part in parts:
        names = {}
        for run in part["runs"]:
            _, _, words = run["name"].partition("-")
            names[run["name"]] = f"{len(runs):02}-{words}"
            runs.append({**run, "name": names[run["name"]]})
        for cell in part["cells"]:
            cells[CellKey(**cell["key"])] = {**cell, "run": names[cell["run"]]}
    asked = {"only": joined_only([part["only"] for part in parts])} if all("only" in p for p in parts) else {}
    return {
        **first,
        **asked,
        "network": network,
        "finished": any(part["finished"] for part in parts) or len(cells) == first.get("planned_cells"),
        "calibrations": [found for part in parts for found in part["calibrations"]],
        "runs": runs,
        "cells": list(cells.values()),
    }
