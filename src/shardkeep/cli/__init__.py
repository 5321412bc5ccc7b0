"""The `shardkeep` command: `main.py` is its entry point, and each command has a module of its own.

`main.py` imports the module of a command only when that command runs, so that help comes at once.
"""
