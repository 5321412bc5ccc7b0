"""A real coordination service in this process, with a client for each of several groups, driven by threads."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax._src.lib import _jax

from multiprocess.cluster import free_port
from shardkeep.processes import Operation, _Group


@contextlib.contextmanager
def groups(size: int) -> Iterator[list[_Group]]:
    """What the processes of a cluster have, each a `_Group` of its own, all in this one."""
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, size, heartbeat_timeout=100, shutdown_timeout=5)
    clients = [_jax.get_distributed_runtime_client(address, i, init_timeout=20) for i in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        made = [_Group(client, i, size) for i, client in enumerate(clients)]
        try:
            yield made
        finally:
            for group in made:
                group.close()
            list(pool.map(lambda client: client.shutdown(), clients))
            service.shutdown()


def everywhere(made: list[_Group], work: Callable[[Operation], Any], what: str = "saving to x") -> list[Any]:
    """What `work` gives, or raises, in each group; each takes part in an operation of its own thread."""

    def one(group: _Group) -> Any:
        try:
            with Operation(what, group) as operation:
                return work(operation)
        except Exception as error:  # noqa: BLE001  (it is what the test wants to see)
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(one, made))
