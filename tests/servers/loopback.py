"""What the servers written here share: threads, a request log, and an end that also ends open connections."""

import contextlib
import socket
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote


@dataclass(frozen=True)
class Request:
    """One answered request: `received` and `sent` are the bytes of the two bodies; status 0 means cut off."""

    method: str
    target: str
    status: int
    received: int
    sent: int


class LoopbackServer(ThreadingHTTPServer):
    """Serves on a free port of 127.0.0.1 as long as the `with` block runs."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        self.stopping = threading.Event()
        self._open: set[Any] = set()

    def count(self, method: str = "", part: str = "") -> int:
        """How many requests there were, of one method, with `part` in their path or query."""
        asked = [request.target for request in list(self.requests) if method in ("", request.method)]
        return sum(part in unquote(target) for target in asked)

    def reset(self) -> None:
        """Forget the requests so far."""
        self.requests.clear()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()
        # Clients keep connections for the next request; after the end nobody must answer on them.
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of ours; a client that went away is none."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class LoopbackHandler(BaseHTTPRequestHandler):
    """Keeps connections alive, answers without delay and does not print."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass
