"""A garbage collector that runs every few allocations, so that destructors land in the midst of calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_often(allocations: int = 20) -> Iterator[None]:
    """Collect after each so many new objects. What earlier tests have left is looked at no more: it would be slow."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(allocations, 2, 2)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.collect()
