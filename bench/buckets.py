"""What saves to and loads from buckets cost: requests and seconds, beside a plain transfer of the same bytes.

    python bench/buckets.py            # about three minutes; prints a table
    python bench/buckets.py --quick    # small trees, one round: shows that it runs, the numbers mean little

The servers are those of the tests, on the loopback and in processes of their own: SeaweedFS for S3, and a GCS server
in Python. So the seconds say how much shardkeep adds to the client, not how fast a bucket is. Plain means: the same
client, eight requests at a time, objects of 32 MiB; "one by one" is an object for each array, which is what the
tensorstore format is held against. Every round does everything once, so that a slow minute of the machine hits all
alike; the median is shown. Requests are counted in a round of their own, through a proxy.
"""

import argparse
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import obstore

import shardkeep
from servers.gcs import gcs_process
from servers.proxy import Proxy
from servers.s3 import S3Server
from shardkeep.stores.bucket.store import CONCURRENCY, OBJECT_LIMIT
from shardkeep.stores.location import location, store_at

ROUNDS = 3
MIB = 1 << 20
FORMATS: dict[str, dict[str, Any]] = {"safetensors": {}, "tensorstore": {"format": "zarr"}}

Action = Callable[[], Any]


def trees(scale: int) -> dict[str, dict[str, Any]]:
    """Random bytes, which no server can make smaller."""
    dice = np.random.default_rng(0)
    large = {f"w{i}": dice.integers(0, 256, 128 * MIB // scale, dtype=np.uint8) for i in range(4)}
    many = {f"layer{i}": dice.integers(0, 256, 16 << 10, dtype=np.uint8) for i in range(2000 // scale)}
    return {f"{512 // scale} MiB in 4 arrays": large, f"{2000 // scale:,} arrays of 16 KiB": many}


def pieces(tree: dict[str, Any], one_by_one: bool) -> list[memoryview]:
    """The tree's bytes as plain objects."""
    if one_by_one:
        return [memoryview(array) for array in tree.values()]
    whole = np.concatenate(list(tree.values()))
    return [memoryview(whole[start : start + OBJECT_LIMIT]) for start in range(0, whole.size, OBJECT_LIMIT)]


def plain(url: str, tree: dict[str, Any], one_by_one: bool) -> tuple[Action, Action]:
    """A plain upload and download."""
    store: Any = store_at(location(url))
    data = pieces(tree, one_by_one)

    def upload() -> None:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(lambda n: store.call(obstore.put, str(n), data[n], use_multipart=False), range(len(data))))

    def download() -> None:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            got = list(pool.map(lambda n: store.call(obstore.get, str(n)).bytes(), range(len(data))))
        assert sum(map(len, got)) == sum(map(len, data))

    return upload, download


def ours(url: str, tree: dict[str, Any], options: dict[str, Any]) -> tuple[Action, Action]:
    return lambda: shardkeep.save(url, tree, **options), lambda: shardkeep.load(url)


def contenders(url: str, tree: dict[str, Any]) -> Iterator[tuple[str, tuple[Action, Action]]]:
    """Each way to upload and download a tree, at a fresh place; what it leaves there goes before the next."""
    names = ["plain", *(["plain, one by one"] if len(tree) > 10 else []), *FORMATS]
    for name in names:
        fresh = f"{url}/{uuid.uuid4().hex}"
        yield name, ours(fresh, tree, FORMATS[name]) if name in FORMATS else plain(fresh, tree, name != "plain")
        store: Any = store_at(location(fresh))
        left = [each["path"] for page in store.call(obstore.list, "") for each in page]
        if left:
            obstore.delete(store.clients().writing, left)


def seconds(action: Action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


Row = tuple[str, str]


def measure(url: str, tree: dict[str, Any], rounds: int) -> dict[Row, float]:
    """Seconds by (contender, direction)."""
    found: dict[Row, list[float]] = {}
    for _ in range(rounds):
        for name, (up, down) in contenders(url, tree):
            found.setdefault((name, "save"), []).append(seconds(up))
            found.setdefault((name, "load"), []).append(seconds(down))
    return {row: statistics.median(times) for row, times in found.items()}


def count(url: str, tree: dict[str, Any], proxy: Proxy) -> dict[Row, int]:
    """Requests by (contender, direction)."""
    found: dict[Row, int] = {}
    for name, both in contenders(url, tree):
        for direction, action in zip(("save", "load"), both, strict=True):
            proxy.reset()
            action()
            found[name, direction] = proxy.count()
    return found


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def table(server: str, url: str, variable: str, address: str, rounds: int, scale: int) -> list[str]:
    lines: list[str] = []
    for title, tree in trees(scale).items():
        with environment(**{variable: address}):
            shardkeep.save(f"{url}/{uuid.uuid4().hex}", {"w": np.arange(3)})  # the first asks more of the server
            times = measure(url, tree, rounds)
        with Proxy(address) as proxy, environment(**{variable: proxy.url}):
            shardkeep.save(f"{url}/{uuid.uuid4().hex}", {"w": np.arange(3)})
            requests = count(url, tree, proxy)
        for (name, direction), took in times.items():
            base = times["plain, one by one" if name == "tensorstore" and len(tree) > 10 else "plain", direction]
            ratio = "" if name.startswith("plain") else f"{took / base:.2f}"
            lines.append(
                f"| {server} | {title} | {direction} | {name} | {requests[name, direction]:,} | {took:.2f} | {ratio} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small trees, one round")
    given = parser.parse_args()
    rounds, scale = (1, 16) if given.quick else (ROUNDS, 1)
    lines = ["| server | tree | | format | requests | seconds | × plain |", "|---|---|---|---|---|---|---|"]
    with ExitStack() as stack:
        gcs = stack.enter_context(gcs_process("--bucket", "bucket"))
        s3 = stack.enter_context(S3Server())
        keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key, "AWS_REGION": s3.region}
        with environment(**keys):
            lines += table("GCS", "gs://bucket", "STORAGE_EMULATOR_HOST", gcs, rounds, scale)
            lines += table("S3", "s3://bucket", "AWS_ENDPOINT_URL", s3.url, rounds, scale)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
