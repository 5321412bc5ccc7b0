"""Checks that run beside another library, in its own environment, without a test runner."""

import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_checks(namespace: Mapping[str, Any]) -> int:
    """Call every `check_…(directory)`, or those named on the command line; 1 if one of them failed."""
    wanted = sys.argv[1:]
    names = [name for name in namespace if name.startswith("check_")]
    chosen = [name for name in names if not wanted or any(word in name for word in wanted)]
    failed = 0
    for name in chosen:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            try:
                namespace[name](Path(directory))
                outcome = "ok"
            except Exception:  # noqa: BLE001  (told, and counted)
                traceback.print_exc()
                outcome, failed = "FAILED", failed + 1
        print(f"{outcome:6} {time.perf_counter() - started:6.2f} s  {name.removeprefix('check_').replace('_', ' ')}")
    if not chosen:
        print(f"no check is called like {' or '.join(wanted)}")
        return 1
    print(f"{failed} of {len(chosen)} failed" if failed else f"all {len(chosen)} passed")
    return 1 if failed else 0
