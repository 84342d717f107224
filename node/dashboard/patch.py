"""What changed between two views, so that a reader is not sent the whole of it every second. Pure.

A view is what `RunView.to_fields` gives. A patch has the fields that differ; a curve that only grew at its
end is sent as its new points alone. `page/stream.js` applies patches as `apply` does.
"""

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]

COLUMNS = ("steps", "times", "values")
"""Of a `node.analysis.series.Curve`, equally long."""


def difference(before: Fields, after: Fields) -> dict[str, Any]:
    """The patch that makes `after` out of `before`; empty when they are equal."""
    return {
        name: _curve_difference(before[name], value) if name in before and _is_curve(value) else value
        for name, value in after.items()
        if name not in before or before[name] != value
    }


def apply(before: Fields, patch: Fields) -> dict[str, Any]:
    """The view after `patch`; the inverse of `difference`."""
    after = dict(before)
    for name, value in patch.items():
        if isinstance(value, dict) and "keep" in value:
            keep = value["keep"]
            old = before[name]
            value = {"stride": old["stride"], **{c: [*old[c][:keep], *value[c]] for c in COLUMNS}}
        after[name] = value
    return after


def _is_curve(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"stride", *COLUMNS}


def _curve_difference(before: Fields, after: Fields) -> dict[str, Any]:
    """The points after the last one that is the same, and how many are kept; all of it after a merge."""
    if before["stride"] != after["stride"]:
        return dict(after)
    pairs = zip(
        zip(*(before[c] for c in COLUMNS), strict=True),
        zip(*(after[c] for c in COLUMNS), strict=True),
        strict=False,
    )
    keep = 0
    for old, new in pairs:
        if old != new:
            break
        keep += 1
    return {"keep": keep, **{c: list(after[c][keep:]) for c in COLUMNS}}
