"""An internet gateway device of UPnP: description, actions, and answers to searches by multicast."""

import contextlib
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
SEARCH_GROUP, SEARCH_PORT = "239.255.255.250", 1900
"""Where devices listen for searches (SSDP)."""
OUTSIDE = "198.18.0.9"
"""Its own address, as it says."""
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0">
<specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{DEVICE}</deviceType>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType>
<serviceList><service><serviceType>{SERVICE}</serviceType>
<serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/event</eventSubURL><SCPDURL>/scpd.xml</SCPDURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>
"""
ONLY_PERMANENT, CONFLICT = 725, 718
"""UPnP's error codes."""
ENVELOPE = (
    '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
    's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{}</s:Body></s:Envelope>'
)


@dataclass
class FakeIgd:
    url: str = ""
    only_permanent: bool = False
    """It maps for ever or not at all."""
    taken: set[int] = field(default_factory=set)
    mapped: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """By the outside port: host, port, seconds."""
    searches: list[str] = field(default_factory=list)
    """Kinds of devices and services that were searched for."""

    def act(self, action: str, values: dict[str, str]) -> tuple[int, str]:
        """HTTP status and body."""
        outside, code, told = int(values.get("NewExternalPort", 0)), 0, ""
        if action == "GetStatusInfo":
            told = "<NewConnectionStatus>Connected</NewConnectionStatus><NewUptime>9</NewUptime>"
        elif action == "GetExternalIPAddress":
            told = f"<NewExternalIPAddress>{OUTSIDE}</NewExternalIPAddress>"
        elif action == "AddPortMapping":
            seconds = int(values["NewLeaseDuration"])
            code = (
                CONFLICT
                if outside in self.taken
                else ONLY_PERMANENT
                if self.only_permanent and seconds
                else 0
            )
            if not code:
                self.mapped[outside] = values["NewInternalClient"], int(values["NewInternalPort"]), seconds
        elif action == "DeletePortMapping":
            self.mapped.pop(outside, None)
        if code:
            named = 'UPnPError xmlns="urn:schemas-upnp-org:control-1-0"'
            detail = f"<{named}><errorCode>{code}</errorCode></UPnPError>"
            fault = "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring>"
            return 500, ENVELOPE.format(f"{fault}<detail>{detail}</detail></s:Fault>")
        return 200, ENVELOPE.format(f'<u:{action}Response xmlns:u="{SERVICE}">{told}</u:{action}Response>')

    def answer_to(self, search: bytes) -> bytes:
        """The answer to a packet of the search's port; empty for none."""
        found = re.search(rb"^ST: *(\S+)", search, re.MULTILINE | re.IGNORECASE)
        if not search.startswith(b"M-SEARCH ") or found is None:
            return b""
        kind = found[1].decode()
        self.searches.append(kind)
        if kind not in (DEVICE, SERVICE, "upnp:rootdevice"):
            return b""
        lines = "HTTP/1.1 200 OK", "CACHE-CONTROL: max-age=120", f"ST: {kind}", f"USN: uuid:1::{kind}"
        return "\r\n".join((*lines, "EXT:", f"LOCATION: {self.url}", "", "")).encode()


@contextlib.contextmanager
def fake_igd(host: str = "127.0.0.1", *, searched: bool = False) -> Iterator[FakeIgd]:
    """A device at this address; `searched`: it also answers searches that come to it by multicast."""
    igd = FakeIgd()

    class Search(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            packet, answering = self.request
            if answer := igd.answer_to(packet):
                answering.sendto(answer, self.client_address)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, DESCRIPTION)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            action = self.headers["SOAPAction"].strip('"').partition("#")[2]
            self._reply(*igd.act(action, dict(re.findall(r"<(New\w+)>([^<]*)</", body))))

        def _reply(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ThreadingHTTPServer((host, 0), Handler))
        igd.url = f"http://{host}:{server.server_address[1]}/description.xml"
        stack.enter_context(_serving(server))
        if searched:
            finder = stack.enter_context(socketserver.UDPServer((SEARCH_GROUP, SEARCH_PORT), Search))
            group = socket.inet_aton(SEARCH_GROUP) + socket.inet_aton(host)
            finder.socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            stack.enter_context(_serving(finder))
        yield igd


@contextlib.contextmanager
def _serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
