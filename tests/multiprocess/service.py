"""A real coordination service in this process, with a client for each of several groups, driven by threads."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

from jax._src.lib import _jax

from multiprocess.cluster import free_port, service_process
from shardkeep.processes.group import Group
from shardkeep.processes.operation import Operation


class Counted:
    """A client that notes the requests made through it, by the names of its methods."""

    def __init__(self, client: Any) -> None:
        self.client, self.requests = client, list[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.client, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.requests.append(name)
            return call(*args, **kwargs)

        return counted


@contextlib.contextmanager
def groups(size: int) -> Iterator[list[Group]]:
    """What the processes of a cluster have, each a `Group` of its own, all in this one."""
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, size, heartbeat_timeout=100, shutdown_timeout=5)
    clients = [_jax.get_distributed_runtime_client(address, i, init_timeout=20) for i in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        made = [Group(client, i, size) for i, client in enumerate(clients)]
        for group in made:
            group.live()
        try:
            yield made
        finally:
            for group in made:
                group.close()
            list(pool.map(lambda client: client.shutdown(), clients))
            service.shutdown()


def everywhere(made: list[Group], work: Callable[[Operation], Any], what: str = "saving to x") -> list[Any]:
    """What `work` gives, or raises, in each group; each takes part in an operation of its own thread."""

    def one(group: Group) -> Any:
        try:
            with Operation(what, group) as operation:
                return work(operation)
        except Exception as error:  # noqa: BLE001  (it is what the test wants to see)
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(one, made))


def _stop(service: "subprocess.Popen[str]") -> None:
    """Stop a process, and wait until all of its threads have stopped: until then they answer."""
    service.send_signal(SIGSTOP)
    while not all(
        (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
        for task in Path(f"/proc/{service.pid}/task").iterdir()
    ):
        time.sleep(0.001)


@contextlib.contextmanager
def pausable() -> Iterator[tuple[Group, Callable[[], None], Callable[[], None]]]:
    """A group of one of two processes, and how to stop the service and let it continue: it is a process of its own."""
    address = f"127.0.0.1:{free_port()}"
    with service_process(address, 1) as service:
        client = _jax.get_distributed_runtime_client(address, 0, init_timeout=20, shutdown_on_destruction=False)
        client.connect()
        group = Group(client, 0, 2)
        group.live()
        try:
            yield group, partial(_stop, service), partial(service.send_signal, SIGCONT)
        finally:
            service.send_signal(SIGCONT)
            group.close()
            client.shutdown()
