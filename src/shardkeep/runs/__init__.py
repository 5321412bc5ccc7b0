"""Runs of checkpoints: when to save, what all processes agree on, preemption, and the state of data iterators."""
