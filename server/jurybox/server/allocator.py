"""Working memory that stays: on a CPU half of an image model's time would otherwise go into page faults."""

from __future__ import annotations

import ctypes

# From malloc.h of the GNU C library; other C libraries have no mallopt, or know other numbers and refuse these.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 256 * 2**20
# The most that every glibc takes.
_LARGEST_KEPT_BLOCK = 32 * 2**20


def keep_freed_memory() -> bool:
    """Let the process keep up to 256 MiB of freed memory instead of handing it back after every batch.

    By default glibc maps every block of a few megabytes anew and unmaps it when freed, so that each intermediate of
    each batch is paid for in page faults. Counts for the whole process, and again costs nothing.

    Returns:
        Whether the C library took the settings; without them everything works, slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK), (_TRIM_THRESHOLD, _KEPT_BYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
