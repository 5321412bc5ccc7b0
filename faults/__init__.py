"""Faults made on purpose: processes that are killed, interrupted, refused or paused at a chosen system call."""
