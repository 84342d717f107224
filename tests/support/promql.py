"""The queries of deploy/: Grafana's dashboards with their variables, and Prometheus' rules."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_VARIABLE = re.compile(r"\$\{?(\w+)(?::\w+)?\}?")
_INTERVALS = {"__rate_interval", "__interval", "__range"}
_LABEL_VALUES = re.compile(r"label_values\((?:(.+),)?\s*(\w+)\s*\)", re.DOTALL)
_EVERYTHING = '{__name__=~"thinwire_.+"}'


@dataclass(frozen=True)
class Query:
    """One expression, and the file and title under which it stands."""

    where: str
    expression: str
    panel: str = ""
    """Of a dashboard: the panel's title; empty for its annotations, its variables, and for rules."""
    label: str = ""
    """Of a dashboard's variable: the label of the expression's series whose values it may have."""

    @property
    def plain(self) -> str:
        """With Grafana's variables replaced: intervals by half a minute, all others by what matches all."""
        return _VARIABLE.sub(lambda found: "30s" if found[1] in _INTERVALS else ".*", self.expression)

    @property
    def metrics(self) -> set[str]:
        return set(re.findall(r"\bthinwire_\w+", self.expression))


def queries() -> list[Query]:
    """All of them."""
    return [*_dashboards(), *_rules()]


def _dashboards() -> Iterator[Query]:
    for path in sorted(DEPLOY.rglob("*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))
        for panel in whole["panels"]:
            for target in panel.get("targets", []):
                yield Query(f"{path.name}: {target['legendFormat']}", target["expr"], panel["title"])
        for node in _objects(whole["annotations"]):
            if isinstance(node.get("expr"), str):
                yield Query(f"{path.name}: {node.get('name', '')}", node["expr"])
        yield from variables(whole, path.name)


def variables(board: dict[str, Any], where: str) -> Iterator[Query]:
    """What a dashboard's variables ask for. Raises ValueError for one that asks with anything but
    `label_values`, which Grafana would show as an empty list."""
    for variable in board["templating"]["list"]:
        asked = variable["query"]["query"]
        if variable["type"] != "query" or not (found := _LABEL_VALUES.fullmatch(asked)):
            raise ValueError(f"{where}: {variable['type']} {asked}")
        yield Query(f"{where}: ${variable['name']}", found[1] or _EVERYTHING, label=found[2])


def _rules() -> Iterator[Query]:
    for path in sorted([*DEPLOY.rglob("*.yml"), *DEPLOY.rglob("*.yaml")]):
        for whole in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for node in _objects(whole):
                if isinstance(node.get("expr"), str):
                    yield Query(f"{path.name}: {node.get('alert', node.get('record', ''))}", node["expr"])


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)
