"""What of a tree does not come back as it was is said, once in a process."""

from pathlib import Path

from support import run_python

CODE = """
import logging, sys
from collections import defaultdict
logging.basicConfig(stream=sys.stdout, format="%(message)s")

def list_():
    return [1]
list_.__name__ = "list"  # known by the name of another

plain = {"w": jnp.ones(3), "d": defaultdict(list, a=1), "e": defaultdict(None, a=1), "n": np.float32(1)}
shardkeep.save(room + "/plain", plain)
print("nothing so far")
made = {f"l{i}": defaultdict(lambda: 0, a=1) for i in range(4)} | {"other": defaultdict(list_, a=1)}
weak = {"scale": jnp.asarray(2.0), "inner": [jnp.ones(3) * 1.0, jnp.sin(1.0)]}
assert weak["scale"].weak_type and not jnp.ones(3).weak_type
shardkeep.save_async(room + "/odd", {"made": made, "weak": weak}).wait()
shardkeep.save(room + "/again", {"made": made, "weak": weak})
loaded = shardkeep.load(room + "/odd")
print(loaded["made"]["other"].default_factory, loaded["made"]["l0"].default_factory, loaded["weak"]["scale"].weak_type)
print(shardkeep.load(room + "/plain")["d"].default_factory)
"""


def test_lost_factories_and_weak_types_are_said_once_with_the_first_keys(tmp_path: Path) -> None:
    assert run_python(f"room = {str(tmp_path)!r}\n{CODE}").splitlines() == [
        "nothing so far",
        "the default_factory of made/l0, made/l1, made/l2 and 2 more is not saved: only int, float, bool, str, bytes, "
        "list, dict, tuple, set are. It is loaded as None, so that a missing key raises KeyError. This warning is "
        "shown once",
        "weak/scale, weak/inner/1: weak types are not saved; "
        "these arrays are loaded with a strong dtype. This warning is shown once",
        "None None False",
        "<class 'list'>",
    ]
