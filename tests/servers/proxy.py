"""A reverse proxy that makes a server fail on purpose.

The `Host` header goes through unchanged, so a signature made for the proxy's address stays valid behind it.
"""

import contextlib
import http.client
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from servers.loopback import LoopbackHandler, LoopbackServer, Request

BLOCK = 256 << 10


@dataclass
class Fault:
    """What happens to the next `times` requests of a `method` whose path and query match a `pattern`.

    - status: the answer is the error `status`.
    - reset, close: the connection ends without an answer, by a TCP reset or in order.
    - delay: the answer comes after `seconds`.
    - cut: the connection ends after `size` bytes of the body.
    - slow: the body comes at `size` bytes a second.

    The first three happen in place of the server, or, if `served`, after it has done its work.
    """

    action: Literal["status", "reset", "close", "delay", "cut", "slow"]
    method: str = ""
    pattern: str = ""
    times: int = 1
    status: int = 503
    served: bool = False
    seconds: float = 0
    size: int = 0
    hits: int = 0

    def matches(self, method: str, target: str) -> bool:
        named = self.method in ("", method) and re.search(self.pattern, unquote(target))
        return self.hits < self.times and bool(named)


class Proxy(LoopbackServer):
    """Stands in front of the server at `url`; the first fault that matches a request happens to it."""

    def __init__(self, url: str) -> None:
        super().__init__(ProxyHandler)
        self.target = urlsplit(url).netloc
        self.faults: list[Fault] = []
        self._lock = threading.Lock()

    def inject(self, fault: Fault) -> Fault:
        """Add a fault; its `hits` will tell how often it happened."""
        self.faults.append(fault)
        return fault

    def reset(self) -> None:
        """Forget the requests and the faults."""
        super().reset()
        self.faults.clear()

    def next_fault(self, method: str, target: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.matches(method, target):
                    fault.hits += 1
                    return fault
        return None


class ProxyHandler(LoopbackHandler):
    """Passes requests on, their bodies block by block."""

    server: Proxy

    def do_GET(self) -> None:
        self.received = int(self.headers.get("Content-Length") or 0)
        fault = self.server.next_fault(self.command, self.path) or Fault("delay")
        fails = fault.action in ("status", "reset", "close")
        if fails and not fault.served:
            for _ in self.blocks():
                pass
            self.fail(fault)
            return
        with contextlib.closing(http.client.HTTPConnection(self.server.target, timeout=600)) as server:
            response = self.forward(server)
            if fails:
                while response.read(BLOCK):
                    pass
                self.fail(fault)
            else:
                self.server.stopping.wait(fault.seconds)
                self.answer(response, fault)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def forward(self, server: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """Send the request on and get the head of the answer."""
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            server.putheader(name, value)
        server.endheaders()
        for block in self.blocks():
            server.send(block)
        return server.getresponse()

    def blocks(self) -> Iterator[bytes]:
        """The body of the request."""
        left = self.received
        while left:
            block = self.rfile.read(min(left, BLOCK))
            if not block:
                raise ConnectionAbortedError("the client stopped in the middle of a body")
            left -= len(block)
            yield block

    def answer(self, response: http.client.HTTPResponse, fault: Fault) -> None:
        self.note(response.status, response.length or 0)
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            self.send_header(name, value)
        self.end_headers()
        left = fault.size if fault.action == "cut" else sys.maxsize
        most = max(1, fault.size // 20) if fault.action == "slow" else BLOCK
        while block := response.read(min(left, most)):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block) if response.chunked else block)
            left -= len(block)
            if fault.action == "slow":
                self.server.stopping.wait(len(block) / fault.size)
        if fault.action == "cut":
            self.hang_up()
        elif response.chunked and self.command != "HEAD":
            self.wfile.write(b"0\r\n\r\n")

    def fail(self, fault: Fault) -> None:
        if fault.action == "status":
            self.note(fault.status, 0)
            self.send_response(fault.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.note(0, 0)
            self.hang_up(by_reset=fault.action == "reset")

    def hang_up(self, by_reset: bool = False) -> None:
        self.close_connection = True
        if by_reset:
            # A socket that may not linger is closed by a reset, if nothing said goodbye before: close it here.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()

    def note(self, status: int, sent: int) -> None:
        self.server.requests.append(Request(self.command, self.path, status, self.received, sent))
