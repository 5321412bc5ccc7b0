"""The `shardkeep` command. `main.py` is the way in; the other modules are what it does, one family each.

Nothing here imports the library before it is known which command runs, so that help comes at once.
"""
