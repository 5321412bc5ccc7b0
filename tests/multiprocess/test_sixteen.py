"""Sixteen processes with one device each: what `bench/scale.py` predicts of a save is what they write and ask."""

import json
from collections import Counter
from pathlib import Path

import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import all_well, run_cluster

pytestmark = pytest.mark.processes4

BENCH = str(Path(__file__).parents[2] / "bench")
SAVE = """
sys.path.insert(0, {bench!r})
import scale
from shardkeep.loading import load as loading
from shardkeep.model import tables

found = scale.Job(16, 4, 2, 256).arrays()
mesh = Mesh(np.array(jax.devices()).reshape(4, 4), ("replica", "fsdp"))
values = {{key: pattern("float32", array.shape, i) for i, (key, array) in enumerate(found.items())}}
arrays = {{key: put(values[key], NamedSharding(mesh, array.sharding.spec)) for key, array in found.items()}}
tree = jax.block_until_ready(scale.tree_of(arrays))
decoded, decode = [], tables.PieceTable.__init__

def counting(self, data):
    decoded.append(len(data))
    decode(self, data)

tables.PieceTable.__init__ = counting
asked = count_requests()
reports, requests = [], []
for n in range(2):
    reports.append(shardkeep.save(root / f"run{{n}}", tree))
    requests.append(dict(asked))
    asked.clear()
before = len(decoded)
template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
again = shardkeep.load(root / "run0", template=template)
wrong = differences(again, scale.tree_of(values))
say(shares=[report.share for report in reports], decoded=before, wrong=wrong, requests=requests)
"""
COUNT = """
from collections import Counter
from shardkeep.processes import group

def count_requests():
    asked = Counter()

    def counted(name, kind):
        plain = getattr(group, name)

        def call(client, key, *others):
            asked["heartbeat" if "/alive/" in key else kind] += 1
            return plain(client, key, *others)

        setattr(group, name, call)

    kinds = dict(set_key="set", set_new_key="set", get_key="get", wait_for_key="wait", list_keys="directory")
    for name, kind in kinds.items():
        counted(name, kind)
    return asked

"""


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(BENCH)
    import scale

    return scale


def test_they_write_and_ask_what_the_bench_predicts(scale: object, tmp_path: Path) -> None:
    said = all_well(run_cluster(COUNT + SAVE.format(bench=BENCH), tmp_path, size=16, devices=1, timeout=400))
    job = scale.Job(16, 4, 2, 256)
    arrays = job.arrays()
    shares = scale.share_out(list(arrays.values()), 16, gathered=False)
    expected: dict[str, int] = {}
    for process, found in enumerate(said):
        (tree,) = scale.planned(job, arrays, shares, process, limit=None).trees
        sizes = {file.name.removeprefix(scale.SAVE_ID): file.size for file in tree.files}
        assert all(name.startswith(f"-{process:05d}-") for name in sizes)
        assert found["shares"] == [sum(sizes.values())] * 2
        assert (found["decoded"], found["wrong"]) == (0, [])
        expected |= sizes
    predicted = scale.count_coordination(16, ["x"])
    for number in range(2):
        asked = sum((Counter(found["requests"][number]) for found in said), Counter())
        assert asked["get"] == predicted["get"]
        assert asked["directory"] == predicted["directory"]
        # At the end of an operation, some are still under way in the background: they count for the next one, or not.
        assert abs(asked["set"] - predicted["set"]) <= 2
        # The leader waits only for keys that it has not found yet.
        assert max(asked["wait"], predicted["wait"]) <= 15 * 3 + 2 * 16
    for number in range(2):
        path = tmp_path / f"run{number}"
        save_id = shardkeep.inspect(path).save_id
        there = {file.name: file.stat().st_size for file in path.iterdir() if file.suffix == ".safetensors"}
        assert there == {f"{save_id}{name}": size for name, size in expected.items()}
        tree = json.loads((path / "manifest.json").read_bytes())["trees"][""]
        assert len(tree["tables"]) == 16
        assert shardkeep.verify(path).ok
        assert left_overs(path) == set()
