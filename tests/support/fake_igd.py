"""An internet gateway device of UPnP on loopback: its description and the two actions that map a port."""

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0">
<specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType>
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

    def act(self, action: str, values: dict[str, str]) -> tuple[int, str]:
        """HTTP status and body."""
        outside, code = int(values["NewExternalPort"]), 0
        if action == "AddPortMapping":
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
        return 200, ENVELOPE.format(f'<u:{action}Response xmlns:u="{SERVICE}"/>')


@contextlib.contextmanager
def fake_igd() -> Iterator[FakeIgd]:
    igd = FakeIgd()

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

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        igd.url = f"http://127.0.0.1:{server.server_address[1]}/description.xml"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield igd
        finally:
            server.shutdown()
            serving.join()
