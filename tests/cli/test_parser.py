"""The command line: every command has help, and what it does not know is refused."""

import re

import pytest

from cli.commands import Run

COMMANDS = ["ls", "inspect", "verify", "diff", "convert", "stats", "clean"]


def test_help_names_every_command_and_the_exit_codes(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for name in COMMANDS:
        assert re.search(rf"^    {name}\b", result.out, re.MULTILINE)
    assert "exit codes:" in result.out
    assert "NO_COLOR" in result.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.code == 0
    assert f"  shardkeep {name} " in result.out.split("example:")[1]
    assert "--json" in result.out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["inspect"],
        ["inspect", "x", "--depth", "0"],
        ["inspect", "x", "--depth", "y"],
        ["ls", "--what"],
    ],
)
def test_a_wrong_command_line_ends_with_2(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.code == 2
    assert "usage: shardkeep" in result.err
