"""What a save to a bucket and a load from it take of memory, beside the tree itself."""

import json

import pytest

import shardkeep
from buckets.fixtures import Place, make_place
from shardkeep.stores.bucket import store as cloud
from support import run_python

MIB = 1 << 20
SIZE = 600 * MIB
BOUND = 2 * cloud.CONCURRENCY * cloud.OBJECT_LIMIT  # what is under way, once as it is copied and once as it is sent

WATCH = f"""
import json, threading, time
tree = {{f"layer{{i}}": np.full({SIZE // 12}, i, np.uint8) for i in range(12)}}
shardkeep.exists("{{url}}/warm")

def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

class Peak:
    def __enter__(self):
        self.start = self.most = held()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over.wait(0.005):
            self.most = max(self.most, held())
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
"""

SAVE = """
found = {{}}
for name, options in {kinds!r}.items():
    if name == "jax.safetensors":
        import jax
        tree = {{key: jax.block_until_ready(jax.numpy.full(value.shape, value[0])) for key, value in tree.items()}}
    with Peak() as peak:
        shardkeep.save(f"{url}/{{name}}", tree, **options)
    found[name] = peak.most - peak.start
print(json.dumps(found))
"""

LOAD = """
del tree
found = {{}}
for name in {kinds!r}:
    with Peak() as peak:
        tree = shardkeep.load(f"{url}/{{name}}")
    assert tree["layer3"][-1] == 3
    found[name] = peak.most - peak.start
    del tree
print(json.dumps(found))
"""

KINDS: dict[str, dict[str, object]] = {
    "run": {},
    "sharded.safetensors": {"max_shard_size": 100 * MIB},
    "model.safetensors": {},
    "jax.safetensors": {},
}
# One exchange file is sent from where it lies. NumPy arrays, which could be changed meanwhile, are copied for that.
BOUNDS = {"run": BOUND, "sharded.safetensors": BOUND, "model.safetensors": SIZE + 64 * MIB, "jax.safetensors": 64 * MIB}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Place:
    made = make_place("s3")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


def test_memory_beside_the_tree_is_bounded(s3: Place) -> None:
    """600 MiB of NumPy arrays; a program of its own measures what it holds."""
    watch = WATCH.replace("{url}", s3.url)
    saved = json.loads(run_python(watch + SAVE.format(url=s3.url, kinds=KINDS)))
    too_much = {name: f"{most / MIB:.0f} MiB" for name, most in saved.items() if most >= BOUNDS[name]}
    assert too_much == {}
    loaded = json.loads(run_python(watch + LOAD.format(url=s3.url, kinds=["run"])))
    beside = {name: most - SIZE for name, most in loaded.items()}
    assert all(most < BOUND for most in beside.values()), {
        name: f"{most / MIB:.0f} MiB" for name, most in beside.items()
    }
    for name in KINDS:
        shardkeep.delete(f"{s3.url}/{name}")
