"""A node's own metrics for Prometheus, on a small HTTP server that `thinwire join --metrics` starts."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from node.run_file.addresses import parse_listen, why_not_bound
from node.telemetry.costs import Ledger
from node.telemetry.metrics import CONTENT_TYPE, NODE_METRICS, Families
from wire.errors import UserError
from wire.figures import Place
from wire.identity.names import join_address
from wire.telemetry import Telemetry
from wire.version import PROTOCOL, VERSION

_SELF = Place(0, -1)
"""A fixed place that represents the node's stage, which may change."""
MOST_ROWS = 256
"""The most rows of a grid."""


class NodeMetrics:
    """Accumulates one node's reports over its epochs."""

    def __init__(self, *, node_id: str, run_id: str, device: str) -> None:
        self._labels = node_id, run_id, device
        self._stage = -1
        self._stages = 0
        self._newest = self._counted = Telemetry()
        self._ledger = Ledger()

    def report(self, telemetry: Telemetry, stage: int, stages: int) -> None:
        """Take the newest totals. The node has stage `stage` of `stages`, -1 for none."""
        if self._newest.epoch != telemetry.epoch or _codecs(self._newest) != _codecs(telemetry):
            self._count()
        self._newest, self._stage, self._stages = telemetry, stage, stages

    def _count(self) -> None:
        """Add the growth since the last counted report. This is lazy because few reports are looked at."""
        before = self._counted if self._counted.epoch == self._newest.epoch else Telemetry()
        growth = self._ledger.growth(_SELF, self._stages, before, self._newest, rows=MOST_ROWS)
        self._ledger.count(growth)
        self._counted = self._newest

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, version 0.0.4."""
        self._count()
        newest, families = self._newest, Families(NODE_METRICS)
        families.set("build_info", 1, VERSION, PROTOCOL)
        families.set("node_info", 1, *self._labels)
        families.set("node_stage", self._stage)
        families.set("node_epoch", newest.epoch)
        for sums in self._ledger.stages.values():
            for kind, seconds in sums.seconds.items():
                families.set("node_seconds_total", seconds, kind)
        self._links(families)
        families.set_state("node_", newest)
        if newest.clock_error_seconds > 0:
            families.set("local_clock_skew_seconds", newest.clock_skew_seconds)
            families.set("local_clock_error_seconds", newest.clock_error_seconds)
        return families.text()

    def _links(self, families: Families) -> None:
        links = self._ledger.links
        for (sender, receiver), link in links.items():
            if sender == _SELF:
                # The receiver counts the damaged frames.
                rejects = links[receiver, sender].rejects
                families.set_link_totals("node_link_", replace(link, rejects=rejects), _peer(*receiver))
        for link in self._newest.links:
            families.set_link_now("node_link_", link, _peer(link.target_replica, link.target))


def _codecs(telemetry: Telemetry) -> list[str]:
    """The codecs of its flows. Bytes are counted by direction, so a change of codec starts a new count."""
    return [flow.codec for link in telemetry.links for flow in link.flows]


def _peer(replica: int, stage: int) -> str:
    """A neighbour's name: its stage, preceded by its row if that is not the first."""
    return f"{replica}/{stage}" if replica else str(stage)


@contextlib.asynccontextmanager
async def serve_metrics(listen: str, render: Callable[[], bytes]) -> AsyncIterator[str]:
    """Answer `GET /metrics` at `listen` (host:port); yields the bound address. Raises UserError."""
    from aiohttp import web

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=render(), headers={"Content-Type": CONTENT_TYPE})

    application = web.Application(client_max_size=1024)
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    host, port = parse_listen(listen)
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise UserError(
                f"cannot serve metrics at {listen} ({why_not_bound(error)}): give another address"
            ) from None
        bound = runner.addresses[0]
        yield join_address(bound[0], bound[1])
    finally:
        await runner.cleanup()
