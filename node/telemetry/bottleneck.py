"""What holds a run back, in words. Pure: it looks at a `RunView` and at nothing else."""

from collections.abc import Mapping

from node.telemetry.run_view import RunView


def bottleneck(view: RunView, codec_bits: Mapping[str, float]) -> tuple[str, ...]:
    """Sentences, the most important first; empty while nothing can be told."""
    if view.state == "waiting for nodes":
        here, wanted = len(view.members), view.stages_wanted
        return (f"waiting for nodes: {here} of {wanted} are here",)
    return ()
