"""`from commands import …` works in the tests of the command, which get it as `run`."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from commands import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command, in this process."""
    return Run(capsys)
