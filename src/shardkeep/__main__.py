"""`python -m shardkeep`: the same as the `shardkeep` command."""

import sys

from shardkeep.cli.main import main

sys.exit(main())
