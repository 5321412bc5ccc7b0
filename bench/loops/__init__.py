"""The same training loop three times: with `shardkeep.Run`, with Orbax's `CheckpointManager`, and with neither.

Each resumes from the newest checkpoint with the position of its data, saves every 10 steps in the background with a
metric, keeps the last three and every 20th, saves on SIGTERM and ends, and saves the last
step. One process, one device.
"""
