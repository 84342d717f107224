"""Watches a run: reads views from its history on disk, even a growing one, or from its page."""

import contextlib
import http.client
import json
import shlex
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from node.display.status import COORDINATOR_GONE, coordinator_is_gone
from node.telemetry.history import HistoryTail
from node.view.checkpoint import read_view
from node.view.run_view import RunView
from node.view.view_builder import RunViewBuilder
from wire.errors import LinkError, ProtocolViolationError, RunError, UserError

MOST_ANSWER = 16 * 1024 * 1024
TIMEOUT_SECONDS = 10.0
"""How long to wait for the next bytes of an answer."""
MOST_SECONDS = 30.0
"""How long to wait for the whole answer."""
RUN_DIR = "RUN_DIR"
"""The placeholder for the run's directory in sentences."""


class HistoryWatch:
    """Views of the run in `directory`. Each call reads what was appended since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.run = RunViewBuilder()
        """The builder of the newest view."""
        self._tail: HistoryTail | None = None

    def view(self) -> RunView:
        """The newest view. Raises RunError if the history cannot be read."""
        if self._tail is None:
            self.run, position = read_view(self._directory)
            self._tail = HistoryTail(self._directory, position)
        while entries := self._tail.read():
            for entry in entries:
                self.run.apply(entry.event, entry.at)
        view = self.run.view()
        if not self.run.over and coordinator_is_gone(self.run.started, self._directory):
            # Advice to join a coordinator no longer applies.
            left = () if view.state == "waiting for nodes" else view.bottleneck
            return replace(view, state="stopped", ended=COORDINATOR_GONE, eta_seconds=None, bottleneck=left)
        # Commands in sentences have a placeholder for the directory, which is known here.
        directory = shlex.quote(str(self._directory))
        sentences = tuple(sentence.replace(RUN_DIR, directory) for sentence in view.bottleneck)
        return replace(view, bottleneck=sentences)


class PageWatch:
    """Views from a coordinator's page, given as `host:port` or as an http or https URL."""

    def __init__(self, address: str, authority: Path | None = None) -> None:
        """`authority`: the file with the run's CA certificate, for a page over https.

        Raises UserError for an invalid address or certificate.
        """
        scheme = "http" if authority is None else "https"
        url = address if "://" in address else f"{scheme}://{address}"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
            # Rejects names that no look-up accepts, such as those with two dots in a row.
            (parts.hostname or "").encode("idna")
        except ValueError:
            parts, port = urllib.parse.urlsplit(""), None
        # A bare word is more likely a missing folder than a host with a page at port 80.
        bare = "://" not in address and port is None
        if parts.scheme not in ("http", "https") or not parts.hostname or bare:
            raise UserError(
                f"{address!r} is neither a run's directory nor its page's address, such as 127.0.0.1:7700"
            )
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port or (443 if self._secure else 80)
        self._address = f"{parts.scheme}://{parts.netloc}"
        self._context = _trusting(authority) if self._secure else None

    def view(self) -> RunView:
        """The newest view. Raises LinkError if the page does not answer, RunError if it is none."""
        try:
            link = http.client.HTTPConnection(self._host, self._port)
            connection = socket.create_connection((self._host, self._port), TIMEOUT_SECONDS)
            with connection, _cut_off(connection), contextlib.closing(link):
                link.sock = connection
                if self._context is not None:
                    link.sock = self._context.wrap_socket(connection, server_hostname=self._host)
                link.request("GET", "/api/view")
                with contextlib.closing(link.getresponse()) as answer:
                    body = answer.read(MOST_ANSWER)
        except ssl.SSLCertVerificationError as error:
            raise RunError(
                f"{self._address} cannot be trusted ({error.verify_message}): give --ca the run's "
                "authority/ca.pem, and an address that its certificate names"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise LinkError(
                f"{self._address} does not answer ({reason}): is the coordinator running?{self._hint(error)}"
            ) from None
        if answer.status != 200:
            raise RunError(f"{self._address}/api/view answers {answer.status}: this is not a run's page")
        try:
            return read_answer(body)
        except ProtocolViolationError as error:
            raise RunError(
                f"{self._address}/api/view is of another thinwire version ({error}): use the coordinator's"
            ) from None

    def _hint(self, error: Exception) -> str:
        """Suggest the other scheme if the answer was not understood."""
        if self._context is None and isinstance(error, (http.client.HTTPException, ConnectionResetError)):
            return " A page with dashboard.tls is at https:// and needs --ca with the run's authority/ca.pem"
        if self._context is not None and isinstance(error, ssl.SSLError):
            return " A page without dashboard.tls is at http:// and needs no --ca"
        return ""


@contextlib.contextmanager
def _cut_off(connection: socket.socket) -> Iterator[None]:
    """Raise TimeoutError if this context takes longer than `MOST_SECONDS`, however often bytes arrive."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):  # the other side has closed it
            same.shutdown(socket.SHUT_RDWR)

    with connection.dup() as same:  # TLS takes the descriptor away from `connection`
        timer = threading.Timer(MOST_SECONDS, cut)
        timer.start()
        try:
            yield
        except (OSError, http.client.HTTPException):
            if not late.is_set():
                raise
        finally:
            timer.cancel()
    if late.is_set():
        raise TimeoutError("timed out")


def _trusting(authority: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else "it contains no certificate"
        raise UserError(
            f"--ca {authority} cannot be used ({reason}): give authority/ca.pem of the run's directory"
        ) from None


def read_answer(body: bytes) -> RunView:
    """The view in a page's answer to `/api/view`, from this or a similar version (`RunView.from_json`).

    Raises ProtocolViolationError for anything else.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolViolationError(f"the answer is not JSON ({error})") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("view"), dict):
        raise ProtocolViolationError("the answer has no view")
    return RunView.from_fields(answer["view"])
