"""Measure the server on a GPU: one command, also for a bare machine without a network (README.md)."""
