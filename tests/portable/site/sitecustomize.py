"""Python runs this when it starts, if its directory is on PYTHONPATH: the program then runs as if on another system."""

import os

if "SHARDKEEP_TEST_AS" in os.environ:
    from portable.elsewhere import simulate

    simulate(os.environ["SHARDKEEP_TEST_AS"])
