"""Real Keras 3: its weights and models are loaded, compared with what the model holds, and converted.

`--fixtures` writes small files of this version of Keras into tests/fixtures/keras.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np

import keras
import shardkeep

NAMES = {"first": "dense", "norm": "batch_normalization", "second": "dense_1"}  # Keras names groups after classes
FIXTURES = Path(__file__).parents[1] / "fixtures" / "keras"


def build(policy: str) -> keras.Model:
    """A small model that was trained for a step, so that its optimizer has slots."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, activation="relu", name="first")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2, name="second")(hidden))
    model.compile("adam", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
    keras.config.set_dtype_policy("float32")
    return model


def check(path: Path, model: keras.Model) -> None:
    """Every weight of the model, and of its optimizer, has the same bits in the file."""
    found = shardkeep.load(path)
    held = [(found["layers"][NAMES[layer.name]]["vars"], layer.weights) for layer in model.layers if layer.weights]
    for stored, weights in [*held, (found["optimizer"]["vars"], model.optimizer.variables)]:
        for number, weight in enumerate(weights):
            here, there = np.asarray(stored[str(number)]), np.asarray(weight.value)
            assert (here.dtype, here.tobytes()) == (there.dtype, there.tobytes()), (path, weight.path)
    report = shardkeep.verify(path)
    assert report.ok, report
    source = shardkeep.inspect(path).source
    assert source == "keras", source


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixtures", action="store_true")
    fixtures = parser.parse_args().fixtures
    with tempfile.TemporaryDirectory() as temporary:
        room = FIXTURES if fixtures else Path(temporary)
        room.mkdir(exist_ok=True)
        for policy in ("float32", "bfloat16", *(() if fixtures else ("mixed_bfloat16", "float16"))):
            model = build(policy)
            name = f"keras-{keras.__version__}-{policy}"
            model.save_weights(room / f"{name}.weights.h5")
            model.save(room / f"{name}.keras")
            for path in (room / f"{name}.weights.h5", room / f"{name}.keras"):
                check(path, model)
                shardkeep.save(Path(temporary) / "ours", shardkeep.load(path), overwrite=True)
                assert shardkeep.verify(Path(temporary) / "ours").unchecked == 0
            print(f"{policy}: the weights of {len(model.layers)} layers and the optimizer's state have the same bits")
    print(f"Keras {keras.__version__}: ok")


if __name__ == "__main__":
    main()
