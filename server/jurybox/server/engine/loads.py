"""A load beside the engine's loop: what a factory changes for the process must not reach forwards of other models.

PyTorch has one default dtype for all threads. Libraries change it while they build a model (`from_pretrained` does),
and a forward that divides bytes, or creates a tensor, would compute in it. So no batch begins in another default dtype
than the engine's, one during which it changed is computed again, and a factory that keeps it changed for long fails.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jurybox.processes.surroundings import kept
from jurybox.protocol import forks

_PATIENCE = 5.0  # seconds that requests wait for a factory to set the default dtype back
_STEP = 0.0005  # seconds between two looks
_SETTERS = ("_set_default_dtype", "_set_default_tensor_type")


class Disturbed(Exception):
    """The default dtype changed during a forward, whose results are discarded."""


class Loads:
    """The load that runs code of a factory, if there is one.

    Attributes:
        running: whether there is one.
        changes: twice the number of times that it has set the default dtype, and one more while it does.
    """

    def __init__(self) -> None:
        self.running = False
        self.changes = 0
        self._thread = 0
        self._dtype = torch.float32
        self._held = 0.0  # seconds that requests have waited
        self._overdue = False
        self._after_fork_in_child()
        forks.register(self)

    @contextlib.contextmanager
    def code(self, changed: Callable[[list[str]], object]) -> Iterator[None]:
        """Run a factory's code in this thread, and set back what it changes, also if it raises.

        Args:
            changed: called with the names of what was set back.

        Raises:
            TimeoutError: after the block, if it kept the default dtype changed while requests waited.
        """
        self._thread, self._dtype = threading.get_ident(), torch.get_default_dtype()
        self._held, self._overdue = 0.0, False
        with self._counting():
            self.running = True
            try:
                with kept(changed):
                    yield
            finally:
                self.running = False
        if self._overdue:
            raise TimeoutError(
                f"it kept torch's default dtype changed for more than {_PATIENCE:g} s while requests of other models "
                "waited: set it back at once, or build the module in the engine's and convert it with .to(dtype)"
            )

    def disturbed(self, changes: int, dtype: torch.dtype) -> bool:
        """Return whether a load may have changed the default dtype during a forward.

        Args:
            changes: the attribute, from before the forward.
            dtype: the default dtype, read after that and before the forward.
        """
        return bool(self.changes != changes or changes & 1 or (self.running and dtype is not self._dtype))

    def restore(self, changes: int, dtype: torch.dtype) -> bool:
        """Set the default dtype back if a forward has changed it; return whether it has.

        Args:
            changes, dtype: as in `disturbed`.

        Raises:
            Disturbed: a load may have changed it meanwhile, and needs what it has set.
        """
        with self._setting:  # a factory sets it before this look or after it
            if self.disturbed(changes, dtype):
                raise Disturbed
            if changed := torch.get_default_dtype() is not dtype:
                torch.set_default_dtype(dtype)
            return changed

    def hold(self) -> bool:
        """Return whether no batch may begin now; wait for a moment then. Call it in the loop's thread."""
        if torch.get_default_dtype() is self._dtype:
            return False
        if self._held >= _PATIENCE:
            self._overdue = True
            torch.set_default_dtype(self._dtype)
            return False
        began = time.monotonic()
        time.sleep(_STEP)
        self._held += time.monotonic() - began
        return True

    def _after_fork_in_child(self) -> None:
        self._setting = threading.RLock()  # held while the load, or `restore`, sets the default dtype

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count this thread's changes of the default dtype: one that begins and ends within a forward counts, too."""
        native: Any = getattr(torch, "_C", None)  # torch has no public name that every setter passes
        before = {name: getattr(native, name) for name in _SETTERS if hasattr(native, name)}

        def counted(setter: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def set_and_count(value: Any) -> Any:
                if threading.get_ident() != self._thread:
                    return setter(value)
                with self._setting:
                    self.changes += 1
                    try:
                        return setter(value)
                    finally:
                        self.changes += 1

            return set_and_count

        for name, setter in before.items():
            setattr(native, name, counted(setter))
        try:
            yield
        finally:
            for name, setter in before.items():
                setattr(native, name, setter)


LOADS = Loads()  # of this process
