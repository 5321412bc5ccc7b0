"""Checkpoints in buckets: real servers on the loopback, real kills, and a proxy that makes requests fail."""
