"""What a load or a save costs: which bytes are fetched, and how many requests are made."""

from collections import Counter
from typing import Any
from urllib.parse import unquote

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkeep
from buckets.fixtures import EFORMER, Place
from servers.loopback import Request
from support import FORMATS, mesh_of, pattern

MIB = 1 << 20
SMALL = 100_000  # bytes of lists, the manifest and headers beside the data


def received(requests: list[Request]) -> int:
    """Bytes of answers that came to the client."""
    return sum(request.sent for request in requests if request.method == "GET")


def fetches(requests: list[Request]) -> int:
    """Requests for a part of an object."""
    return sum(request.status == 206 for request in requests)


def loaded(watched: Place, path: str, **options: Any) -> tuple[Any, list[Request]]:
    watched.forget()
    tree = jax.block_until_ready(shardkeep.load(path, **options))
    return tree, watched.requests


def save_layers(watched: Place, kind: str) -> tuple[str, dict[str, Any]]:
    """Eight layers of 1.5 MiB."""
    ending, arguments = FORMATS[kind]
    path = f"{watched.url}/run{ending}"
    tree = {
        "layers": {
            str(i): {"w": pattern(np.float32, (512, 768), i), "b": pattern(np.float32, (768,), i)} for i in range(8)
        }
    }
    shardkeep.save(path, tree, **({"max_shard_size": 4 * MIB} if kind == "shards" else arguments))
    return path, tree


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_one_layer_is_fetched_alone(kind: str, watched: Place) -> None:
    path, tree = save_layers(watched, kind)
    got, requests = loaded(watched, path, include="layers/5/")
    assert got["layers"]["5"]["w"].tobytes() == tree["layers"]["5"]["w"].tobytes()
    layer = 512 * 768 * 4 + 768 * 4
    # An exchange file's header is read with what comes right after it, before and after the load.
    heads = {"exchange": 3, "shards": 9}.get(kind, 0) * (64 << 10)
    assert layer * 0.9 <= received(requests) <= layer + SMALL + heads
    assert fetches(requests) <= {"tensorstore": 2, "zstd": 2, "exchange": 5, "shards": 11}.get(kind, 2)


def test_one_prefix_is_fetched_alone(watched: Place) -> None:
    path = f"{watched.url}/run"
    for number, prefix in enumerate(("model", "opt")):
        shardkeep.save(path, {"w": pattern(np.uint8, (3 * MIB,), number)}, prefix=prefix)
    got, requests = loaded(watched, path, prefix="opt")
    assert got["w"].tobytes() == pattern(np.uint8, (3 * MIB,), 1).tobytes()
    assert 3 * MIB <= received(requests) <= 3 * MIB + SMALL


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange"])
def test_large_arrays_come_in_large_parts(kind: str, watched: Place) -> None:
    ending, arguments = FORMATS[kind]
    path = f"{watched.url}/run{ending}"
    values = pattern(np.uint8, (24, MIB))
    shardkeep.save(path, {"w": values}, **arguments)
    got, requests = loaded(watched, path, shardings={"w": NamedSharding(mesh_of(8), P("a"))})
    assert np.asarray(got["w"]).tobytes() == values.tobytes()
    assert 24 * MIB <= received(requests) <= 24 * MIB + SMALL + 3 * (64 << 10)
    assert fetches(requests) <= 5


def test_neighbours_come_together_and_distant_ones_apart(watched: Place) -> None:
    """2,000 arrays of 1 KiB come in one request; two of them from the ends of an object in two."""
    tree = {f"{i:04}": pattern(np.uint8, (1024,), i) for i in range(2000)}
    path = f"{watched.url}/run"
    shardkeep.save(path, tree)
    _, requests = loaded(watched, path)
    assert fetches(requests) == 1
    got, requests = loaded(watched, path, include="^(0000|1999)$")
    assert got["1999"].tobytes() == tree["1999"].tobytes()
    assert fetches(requests) == 2
    data = sum(request.sent for request in requests if request.status == 206)
    assert data <= 4096


def test_a_load_makes_two_requests_beside_those_for_data(watched: Place) -> None:
    path = f"{watched.url}/run"
    shardkeep.save(path, {"w": np.arange(10)})
    _, requests = loaded(watched, path)
    assert [(r.method, r.status) for r in requests] == [("GET", 200), ("GET", 200), ("GET", 206)]
    shardkeep.save(path, {"w": np.arange(10)}, prefix="deep.er")
    _, requests = loaded(watched, path, prefix="deep.er")
    assert len(requests) == 4  # one list more: it lies deeper


def test_few_of_many_objects_are_not_listed_all(gcs: Place) -> None:
    path = f"{gcs.url}/run"
    tree = {f"{i:04}": np.full(2, i) for i in range(1100)}
    shardkeep.save(path, tree, format="zarr")
    gcs.server.reset()
    assert shardkeep.load(path, include="^(1090|1091)$")["1090"].tolist() == [1090, 1090]
    # The directory (of three pages), the manifest, a page of the list; then size and data of the two.
    assert gcs.server.count() <= 3 + 1 + 1 + 2 * 2
    gcs.server.reset()
    shardkeep.load(path)
    assert gcs.server.count("HEAD") <= 8
    assert gcs.server.count("GET", "list-type") <= 6
    assert gcs.server.count() <= 8 + 6 + 1 + 1100


def test_requests_of_a_save(watched: Place) -> None:
    """What does not depend on the size of the tree; the first save in a bucket has three more."""
    path = f"{watched.url}/run"
    shardkeep.save(path, {"w": np.arange(10)})
    watched.forget()
    shardkeep.save(path, {"w": np.arange(10)}, overwrite=True)
    count = Counter(request.method for request in watched.requests)
    lists = sum("list-type" in request.target for request in watched.requests)
    assert lists <= 3
    assert count["PUT"] == 6  # the lock twice, the record twice, the data, the manifest
    assert len(watched.requests) <= 15


def test_a_save_of_many_arrays_makes_as_few_requests(watched: Place) -> None:
    path = f"{watched.url}/run"
    shardkeep.save(f"{watched.url}/first", {"w": np.arange(1)})
    watched.forget()
    shardkeep.save(path, {f"{i:04}": np.full(2, i) for i in range(1000)})
    assert len(watched.requests) <= 15


def test_an_eformer_checkpoint_is_listed_once(watched: Place) -> None:
    watched.upload(EFORMER / "ts_plain" / "ckpt", "run")
    arrays = sum(name.endswith(".zarray") for name in watched.names())
    shardkeep.exists(f"{watched.url}/run")
    _, requests = loaded(watched, f"{watched.url}/run")
    assert arrays > 1
    assert sum("list-type" in request.target for request in requests) == 3
    assert sum(request.method == "HEAD" for request in requests) == 0
    assert sum(".zarray" in request.target or "%2Ezarray" in request.target for request in requests) == arrays


def test_a_further_tree_costs_one_request_beside_those_of_one_save(watched: Place) -> None:
    """That is the one for its data: the lock, the record and the manifest are those of one save."""
    counts: list[Counter[str]] = []
    shardkeep.save(f"{watched.url}/first", {"w": np.arange(10)})  # the first save to a bucket tests its conditions
    for number, prefixes in enumerate(((), ("ema",), ("ema", "data", "more"))):
        watched.forget()
        trees = {prefix: {"w": np.arange(10)} for prefix in prefixes}
        shardkeep.save(f"{watched.url}/run_{number}", {"w": np.arange(10)}, trees=trees)
        counts.append(Counter(request.method for request in watched.requests))
        puts = [unquote(request.target) for request in watched.requests if request.method == "PUT"]
        assert sum("manifest.json" in target for target in puts) == 1
        assert sum(".safetensors" in target for target in puts) == 1 + len(prefixes)
    assert [count - counts[0] for count in counts] == [Counter(), Counter({"PUT": 1}), Counter({"PUT": 3})]
