"""Descriptors of this process, and programs that inherit what they may."""

from __future__ import annotations

import os


def open_files() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def start_helper() -> int:
    """Start a program that outlives this process, and inherits what it may; return its process id, to end it by."""
    return os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
