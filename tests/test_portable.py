"""The core of shardkeep where the system lacks what Linux has: on simulated macOS and Windows.

`make test-portable` runs much of the suite on simulated macOS. docs/portability.md says what this proves and what not.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE / "portable" / "core.py"
CASES = re.findall(r"^@case\ndef (\w+)", CORE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=["macos", "windows"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What came of each case: nothing, or the traceback of an error."""
    place = tmp_path_factory.mktemp(request.param)
    path = [str(HERE / "portable" / "site"), os.environ["PYTHONPATH"]]
    environment = {"SHARDKEEP_TEST_AS": request.param, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, str(CORE), str(place)],
        env=os.environ | environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((place / "results.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_it_works_elsewhere(case: str, outcomes: dict[str, str]) -> None:
    assert outcomes[case] == "", outcomes[case]
