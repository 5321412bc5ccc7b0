"""Two JAX processes save to one bucket together, and each loads from it what its devices need."""

import sys
import time
from pathlib import Path

import pytest

import shardkeep
from buckets.fixtures import Place, make_place, s3_server
from multiprocess.cluster import all_well, run_cluster
from multiprocess.inside import differences, values_of
from servers.gcs import GCSServer, gcs_process
from servers.proxy import Proxy
from support import FORMATS

MIB = 1 << 20

ROUNDTRIP = """
from support import FORMATS
wrong = []
for url in {urls!r}:
    for number, (kind, (ending, arguments)) in enumerate(FORMATS.items()):
        if kind not in {kinds!r}[url]:
            continue
        path, values = f"{{url}}/{{kind}}{{ending}}", values_of(number)
        tree = arrays_of(values, mesh_over((2, 2)), 1)
        if kind == "shards":
            arguments = {{"max_shard_size": 5000}}
        if kind in ("tensorstore", "exchange"):
            shardkeep.save(path, arrays_of(values_of(9), mesh_over((4, 1)), 0), **arguments)
        shardkeep.save_async(path, tree, overwrite=True, **arguments).wait()
        loaded = shardkeep.load(path, template=abstract_of(values, mesh_over((1, 4)), 2))
        wrong += [f"{{path}}: {{w}}" for w in differences(loaded, values)]
    manager = shardkeep.serialization.AsyncCheckpointManager()
    mesh = mesh_over((2, 2))
    manager.save_pytree(tree, f"{{url}}/manager", mesh, prefix="model", extras={{"a": 1}})
    template = abstract_of(values, mesh, 0)
    loaded, extras = manager.load_pytree(f"{{url}}/manager", mesh, prefix="model", template=template)
    wrong += differences(loaded, values)
say(wrong=wrong, extras=extras)
"""


def test_two_processes_save_and_load_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs_process("--bucket", "bucket") as url:
        gs, s3 = Place("gs", GCSServer, "together", url), make_place("s3")
        variables = {"STORAGE_EMULATOR_HOST": url, **s3.environment()}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        kinds = {gs.url: ("safetensors", "tensorstore", "shards"), s3.url: ("tensorstore", "zstd", "exchange")}
        script = "import shardkeep.serialization\n" + ROUNDTRIP.format(urls=list(kinds), kinds=kinds)
        said = all_well(run_cluster(script, tmp_path / "room", environment=variables))
        assert [one["wrong"] for one in said] == [[], []]
        assert [one["extras"] for one in said] == [{"a": 1}, {"a": 1}]
        for place, chosen in kinds.items():
            for number, (kind, (ending, _)) in enumerate(FORMATS.items()):
                if kind not in chosen:
                    continue
                path = f"{place}/{kind}{ending}"
                assert differences(shardkeep.load(path), values_of(number)) == []
                assert shardkeep.verify(path).ok
        left = [name for name in s3.names() if "/saves/" in name or name.endswith(("lock", ".tmp"))]
        assert left == []


SHARES = """
values = np.arange({size} // 4, dtype=np.int32).reshape(64, -1)
sharding = NamedSharding(mesh_over((4, 1)), P("a"))
good = []
for url in {urls!r}:
    shardkeep.save(f"{{url}}/run", {{"w": spread(values, P("a"), (4, 1))}}, format="zarr")
    good.append(holds(shardkeep.load(f"{{url}}/run", shardings={{"w": sharding}})["w"], values))
say(good=good)
"""


def test_each_process_sends_and_fetches_only_what_its_devices_hold(tmp_path: Path) -> None:
    size = 16 * MIB
    with GCSServer() as gcs, Proxy(gcs.url) as before_gcs, Proxy(s3_server().url) as before_s3:
        places = [Place("gs", gcs, "shares", before_gcs.url, before_gcs), make_place("s3", before_s3)]
        variables = {name: value for place in places for name, value in place.environment().items()}
        script = SHARES.format(size=size, urls=[place.url for place in places])
        said = all_well(run_cluster(script, tmp_path / "room", environment=variables))
        assert [one["good"] for one in said] == [[True, True], [True, True]]
        for place in places:
            sent = sum(request.received for request in place.requests if request.method == "PUT")
            fetched = sum(request.sent for request in place.requests if request.method == "GET")
            # Once each, in all: if each process sent or fetched everything it would be twice that.
            assert size <= sent < size + MIB
            assert size <= fetched < size + MIB


def test_processes_that_do_not_see_the_same_bucket_are_told(tmp_path: Path) -> None:
    script = """
os.environ["STORAGE_EMULATOR_HOST"] = os.environ[f"TEST_SERVER_{index}"]
say(**caught(shardkeep.save, "gs://bucket/run", {"w": spread(np.arange(64.0), P("a"), (4, 1))}))
"""
    with GCSServer() as one, GCSServer() as two:
        started = time.monotonic()
        environment = {"TEST_SERVER_0": one.url, "TEST_SERVER_1": two.url}
        said = [outcome.said for outcome in run_cluster(script, tmp_path / "room", environment=environment)]
        assert time.monotonic() - started < 40
        assert all("same shared directory or bucket" in each["message"] for each in said), said
        for server in (one, two):
            assert not [name for name in server.objects["bucket"] if name.endswith("manifest.json")]


RUN = """
import subprocess
import shardkeep.runs.writing
shardkeep.runs.writing.POLL = 0.5
split = NamedSharding(mesh_over((4, 1)), P("a"))
class Data:
    position = 0
    def get_state(self): return {{"position": self.position, "process": index}}
    def set_state(self, state): self.position = state["position"]; assert state["process"] == index
def new_state():
    return {{"w": jnp.zeros(8)}}
def opened():
    return shardkeep.Run({url!r}, keep=shardkeep.Keep(last=2))
data = Data()
def step_of(run, step):
    data.position += 1
    time.sleep(0.002 * (index + 1))
    return run.step(step, {{"w": state["w"] + step}}, metrics={{"loss": 1.0 * step}}, iterators={{"train": data}})
with opened() as run:
    state, step = run.resume(new_state, shardings=split, iterators={{"train": data}})
    saved = None
    while saved is None and step < 8 * 50_000:
        step += 8
        if step == 80 and index == 1:
            subprocess.run([{python!r}, "-m", "shardkeep", "save-now", {url!r}], check=True)
        saved = step_of(run, step)
    requested = step
    saved.wait()
    while not run.stopping and step < 8 * 100_000:
        step += 8
        if step == requested + 80 and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        step_of(run, step)
stopped, position = step, data.position
data = Data()
with opened() as run:
    loaded, step = run.resume(new_state, shardings=split, iterators={{"train": data}})
    again = np.asarray(loaded["w"].addressable_shards[0].data)[0] == step and data.position == position
    steps = [each.number for each in run.steps()]
again = bool(again and loaded["w"].sharding == split)
say(requested=requested, stopped=stopped, step=step, steps=steps, again=again)
"""


def test_a_run_of_two_processes_saves_on_request_stops_and_resumes_in_a_bucket(place: Place, tmp_path: Path) -> None:
    url = f"{place.url}/run"
    script = RUN.format(url=url, python=sys.executable)
    said = all_well(run_cluster(script, tmp_path / "room", environment=place.environment()))
    assert said[0] == said[1]
    one = said[0]
    assert one["again"]
    assert one["steps"] == [one["requested"], one["stopped"]]
    assert one["step"] == one["stopped"] >= one["requested"] + 80
    left = [name for name in place.names("run/.shardkeep-run") if not name.endswith("/index.json")]
    assert left == []
