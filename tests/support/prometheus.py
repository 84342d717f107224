"""A real Prometheus for tests: Debian's package `prometheus`, on a free port, with files of its own.

with Prometheus(tmp_path, {"coordinator": "127.0.0.1:7702"}) as prometheus:
    prometheus.wait_for('up{job="coordinator"} == 1')
    prometheus.query("sum(rate(thinwire_link_bytes_total[30s]))")
"""

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.ports import free_port

BINARY = shutil.which("prometheus")
MISSING = "Prometheus is not installed (Debian and Ubuntu: apt install prometheus)"
SECONDS = 60.0


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
        """The `data` of one API answer. Raises QueryError for an answer that is an error."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=10) as answer:
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
        """Labels and value of every sample that an instant query gives now."""
        data = self.get("query", query=expression)
        assert data["resultType"] in ("vector", "scalar"), data
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def wait_for(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """What a query gives, once it gives anything."""
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
        """Every metric that was scraped."""
        return set(self.get("label/__name__/values"))

    def labels(self, name: str) -> set[str]:
        """The labels that a metric's samples carry, Prometheus' own left out."""
        series = self.get("series", **{"match[]": name})
        return {label for one in series for label in one} - {"__name__", "job", "instance"}
