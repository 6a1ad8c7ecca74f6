"""Measure the server on a GPU: one command, also for a bare machine without a network (docs/gpu.md)."""
