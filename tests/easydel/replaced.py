"""`import replaced` puts `shardkeep.serialization` in the place of `eformer.serialization`, modules and all.

As a plugin of pytest it does so for any tests: `PYTHONPATH=tests/easydel python -m pytest -p replaced …`.
"""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import shardkeep.serialization
from shardkeep.serialization import async_manager, checkpointer, serialization, sharding_utils, utils

PLACE = "eformer.serialization"
MODULES = (async_manager, checkpointer, serialization, sharding_utils, utils)

if PLACE in sys.modules:
    raise ImportError(f"{PLACE} was imported before it could be replaced")
sys.modules[PLACE] = shardkeep.serialization
for module in MODULES:
    sys.modules[f"{PLACE}.{module.__name__.rpartition('.')[2]}"] = module
