"""Grafana's dashboards and the alert rules: structure, and every query against the metrics that there are."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql

from node.coordinator.metrics import STATES
from node.telemetry.clock import TimeKind
from node.telemetry.metrics import PREFIX, RUN_METRICS, MetricKind
from node.view.step_model import FULL, LITTLE
from tests.support.cases import each
from tests.support.prometheus import Query, queries

METRICS = {PREFIX + one.name: one for one in RUN_METRICS}
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""
RATES = {"rate", "increase", "irate"}
VALUES = {"kind": set(TimeKind), "state": set(STATES)}
"""What these labels may be."""
Node = Any


def parse(query: Query) -> Node:
    return promql.parse(re.sub(r"\$__\w+", "1m", query.plain))


def metric(name: str) -> tuple[str, set[str]]:
    """The definition's name and the labels of a series; KeyError for one that does not exist."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    if base in METRICS and METRICS[base].kind is MetricKind.HISTOGRAM and base != name:
        return base, {*METRICS[base].labels, *(["le"] if name.endswith("_bucket") else [])}
    return name, set(METRICS[name].labels)


def selectors(node: Node, inside: str = "") -> Iterator[tuple[Node, str]]:
    """Every selector of series, with the function that it stands in directly."""
    if isinstance(node, promql.VectorSelector):
        yield node, inside
    elif isinstance(node, promql.MatrixSelector):
        yield from selectors(node.vector_selector, inside)
    elif isinstance(node, promql.Call):
        for argument in node.args:
            yield from selectors(argument, node.func.name)
    else:
        for name in ("lhs", "rhs", "expr", "param"):
            if (child := getattr(node, name, None)) is not None and not isinstance(child, str):
                yield from selectors(child)


def labels_of(node: Node) -> set[str]:
    """The labels that the result of an expression carries."""
    if isinstance(node, promql.VectorSelector):
        if node.name is None:
            return set().union(*(one.labels for one in METRICS.values()), SCRAPED)
        return (metric(node.name)[1] if node.name != "up" else set()) | SCRAPED
    if isinstance(node, promql.MatrixSelector):
        return labels_of(node.vector_selector)
    if isinstance(node, promql.AggregateExpr):
        grouped = set(node.modifier.labels) if node.modifier else set()
        inner = labels_of(node.expr)
        assert grouped <= inner, f"grouped by {grouped - inner}, which is no label here"
        return inner if str(node.op) == "topk" else grouped
    if isinstance(node, promql.Call):
        found = set().union(*(labels_of(argument) for argument in node.args)) if node.args else set()
        return found - {"le"} if node.func.name == "histogram_quantile" else found
    if isinstance(node, promql.BinaryExpr):
        left, right = labels_of(node.lhs), labels_of(node.rhs)
        return left or right
    inner = getattr(node, "expr", None)
    return labels_of(inner) if inner is not None else set()


def check(query: Query) -> Node:
    """Raise for a metric, label or label value that does not exist, and for a counter without a rate."""
    tree = parse(query)
    for selector, inside in selectors(tree):
        if selector.name in ("up", None):
            continue
        base, labels = metric(selector.name)
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels | SCRAPED, f"{selector.name} has no label {matcher.name}"
            values = VALUES.get(matcher.name)
            if values is not None and matcher.value != ".*":
                matching = [value for value in values if re.fullmatch(matcher.value, value)]
                assert matching, f"no {matcher.name} is like {matcher.value}"
        counts = METRICS[base].kind is not MetricKind.GAUGE
        # The mean over a process's life is the one use of a counter as it is.
        mean = selector.name.endswith(("_sum", "_count"))
        assert query.label or (inside in RATES) == counts or (counts and mean), (
            f"{selector.name} inside {inside or 'nothing'}"
        )
    carried = labels_of(tree)
    assert not query.label or query.label in carried, f"{query.expression} has no label {query.label}"
    return tree


@each("query", queries())
def test_every_query_uses_existing_metrics(query: Query) -> None:
    check(query)


def thresholds(where: str) -> list[float]:
    """The numbers that the named query, of an alert or of a panel by its title, compares with."""
    (query,) = [one for one in queries() if where in (one.where.partition(": ")[2], one.panel)]

    def compared(node: Node) -> Iterator[float]:
        if isinstance(node, promql.BinaryExpr):
            if isinstance(node.rhs, promql.NumberLiteral):
                yield node.rhs.val
            yield from compared(node.lhs)
            yield from compared(node.rhs)

    return list(compared(parse(query)))


def test_the_page_and_the_analysis_agree_on_full_and_little_used() -> None:
    assert thresholds("ThinwireLinkSaturated") == [FULL]
    assert thresholds("Measured capacity") == [LITTLE]
