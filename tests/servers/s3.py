"""A real S3 server, SeaweedFS, on the loopback: it checks signatures and conditional puts are exact."""

import atexit
import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Self

PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
PORTS += ("filer.port", "filer.port.grpc")


class S3Server:
    """SeaweedFS for the time of a `with` block, with one bucket and one key that may do everything.

    It needs three seconds to start: tests share one (`shared_s3`), each under a prefix of its own.
    """

    region = "us-east-1"
    access_key = "shardkeep-key"
    secret_key = "shardkeep-secret"
    reader_key = "shardkeep-reader"  # may read and list, not write

    def __init__(self, bucket: str = "bucket") -> None:
        self.bucket = bucket
        self.url = ""
        self.room = Path()
        self.ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.room = Path(tempfile.mkdtemp(prefix="shardkeep-s3-"))
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.url = f"http://127.0.0.1:{self.ports['s3.port']}"
        try:
            self.start()
            self.make_bucket(self.bucket)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.room, ignore_errors=True)
        for port in self.ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()

    def start(self, seconds: float = 60) -> None:
        """Start the server, or start it again after `kill`, and wait until it answers."""
        rights = {self.access_key: ["Admin", "Read", "Write", "List", "Tagging"], self.reader_key: ["Read", "List"]}
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": self.secret_key}], "actions": actions}
            for key, actions in rights.items()
        ]
        config = self.room / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        data = self.room / "data"
        data.mkdir(exist_ok=True)
        # The server must not outlive a test process that was killed.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command = [
            *guard,
            str(Path(sys.executable).parent / "weed"),
            "-logtostderr=true",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={data}",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            "-master.electionTimeout=1s",
            "-master.heartbeatInterval=100ms",
            "-volume.max=100",
            "-s3",
            f"-s3.config={config}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={self.room / 's3.sock'}",
            f"-filer.localSocket={self.room / 'filer.sock'}",
            *(f"-{name}={port}" for name, port in self.ports.items()),
        ]
        with open(self.room / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.room)
        self._wait(time.monotonic() + seconds)

    def kill(self) -> None:
        """End the server at once, as a crash would; its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket: to SeaweedFS a bucket is a directory of its filer."""
        status = _ask(self.ports["filer.port"], "POST", f"/buckets/{name}/")
        if status not in (200, 201):
            raise RuntimeError(f"bucket {name!r} could not be made: HTTP {status}\n{self.log()}")

    def log(self) -> str:
        """The end of what the server printed."""
        return (self.room / "log").read_text(errors="replace")[-4000:]

    def _wait(self, deadline: float) -> None:
        assert self._process is not None
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"weed ended with {self._process.returncode}\n{self.log()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"weed does not answer\n{self.log()}")
            try:
                if _ask(self.ports["s3.port"], "GET", "/healthz") == 200 and self._can_store():
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.05)

    def _can_store(self) -> bool:
        """Whether a volume can be had: the S3 port answers earlier than that."""
        return _ask(self.ports["master.port"], "GET", "/dir/assign") == 200


@cache
def shared_s3() -> S3Server:
    """One server for all tests of this process; it ends with the process."""
    server = S3Server().__enter__()
    atexit.register(server.__exit__)
    return server


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _ask(port: int, method: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()
