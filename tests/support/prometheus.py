"""A real Prometheus, on a free port, and the queries of deploy/: dashboards, their variables, and rules.

with Prometheus(tmp_path, {"coordinator": "127.0.0.1:7702"}) as prometheus:
    prometheus.wait_for('up{job="coordinator"} == 1')
    prometheus.query("sum(rate(thinwire_link_bytes_total[30s]))")
"""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.support.paths import ROOT
from tests.support.ports import free_port

BINARY = shutil.which("prometheus")
MISSING = "Prometheus is not installed (Debian and Ubuntu: apt install prometheus)"
SECONDS = 120.0


class QueryError(AssertionError):
    """Prometheus did not accept a query."""


class Prometheus:
    """Scrapes `targets` (job -> host:port) every half second."""

    def __init__(self, directory: Path, targets: Mapping[str, str]) -> None:
        self._directory = directory
        self._targets = targets
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def __enter__(self) -> Self:
        assert BINARY is not None, MISSING
        self._directory.mkdir(parents=True, exist_ok=True)
        jobs = [
            {"job_name": job, "scrape_interval": "500ms", "static_configs": [{"targets": [target]}]}
            for job, target in self._targets.items()
        ]
        config = self._directory / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": jobs}))  # JSON is YAML
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        with (self._directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    BINARY,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._directory / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if error is not None:
            error.add_note((self._directory / "prometheus.log").read_text(errors="replace")[-3000:])

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of one API response. Raises QueryError for an error."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=60) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:
                    raise ConnectionError("Prometheus is not ready yet") from None
                raise QueryError(f"{path} {parameters}: {error.read().decode()}") from None
        if body["status"] != "success":
            raise QueryError(f"{path} {parameters}: {body}")
        return body["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample of an instant query."""
        data = self.get("query", query=expression)
        assert data["resultType"] in ("vector", "scalar"), data
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def wait_for(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Wait until a query gives samples; returns them."""
        deadline = time.monotonic() + SECONDS
        pause = threading.Event()
        while time.monotonic() < deadline:
            try:
                if found := self.query(expression):
                    return found
            except OSError:
                assert self._process is not None and self._process.poll() is None, "Prometheus has ended"
            pause.wait(0.1)
        raise AssertionError(f"{expression} gave nothing within {SECONDS:g} s")

    def names(self) -> set[str]:
        """Names of all scraped metrics."""
        return set(self.get("label/__name__/values"))

    def labels(self, name: str) -> set[str]:
        """The labels of a metric's samples, without Prometheus' own."""
        series = self.get("series", **{"match[]": name})
        return {label for one in series for label in one} - {"__name__", "job", "instance"}


# ---- queries of deploy/

DEPLOY = ROOT / "deploy"
_VARIABLE = re.compile(r"\$\{?(\w+)(?::\w+)?\}?")
_INTERVALS = {"__rate_interval", "__interval", "__range"}
_LABEL_VALUES = re.compile(r"label_values\((?:(.+),)?\s*(\w+)\s*\)", re.DOTALL)
_EVERYTHING = '{__name__=~"thinwire_.+"}'


@dataclass(frozen=True)
class Query:
    """One expression, with its file and title."""

    where: str
    expression: str
    panel: str = ""
    """The title of a dashboard's panel; empty for annotations, variables and rules."""
    label: str = ""
    """For a dashboard's variable: the label that its values are taken from."""

    @property
    def plain(self) -> str:
        """The expression with Grafana's variables replaced: intervals by 30 s, others by a match of all."""
        return _VARIABLE.sub(lambda found: "30s" if found[1] in _INTERVALS else ".*", self.expression)

    @property
    def metrics(self) -> set[str]:
        return set(re.findall(r"\bthinwire_\w+", self.expression))


def queries() -> list[Query]:
    """All queries of deploy/."""
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
    """The queries of a dashboard's variables.

    Raises ValueError for one without `label_values`, which Grafana would show as an empty list.
    """
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
