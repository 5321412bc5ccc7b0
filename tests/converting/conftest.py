"""What the command converts is tested with it, as `run`."""

from cli.commands import run

__all__ = ["run"]
