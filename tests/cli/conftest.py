"""The tests of the command get it as `run`."""

from cli.commands import run

__all__ = ["run"]
