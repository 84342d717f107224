"""What the page does with the feed's patches, in Python."""

from typing import Any

from node.dashboard.feed import COLUMNS, Fields


def apply_patch(before: Fields, patch: Fields) -> dict[str, Any]:
    """As `applyPatch` in node/dashboard/page/stream.js."""
    after = dict(before)
    for name, value in patch.items():
        if isinstance(value, dict) and "keep" in value:
            keep = value["keep"]
            old = before[name]
            value = {"stride": old["stride"], **{c: [*old[c][:keep], *value[c]] for c in COLUMNS}}
        after[name] = value
    return after
