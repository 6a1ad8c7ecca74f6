"""Jurybox: an inference service for reinforcement learning. `jurybox.connect` connects to a server."""

from __future__ import annotations

import importlib
import os
from typing import Any

# In an editable installation the subpackages are in several folders. Without pathlib, which would take longer.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "client")):  # noqa: PTH112, PTH118, PTH120
    # In this form, which tools that read code without running it know as that of a package in several folders.
    __path__ = __import__("pkgutil").extend_path(__path__, __name__)

__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, and only then: `import jurybox.protocol` must not import the client."""
    if name == "connect":
        return importlib.import_module("jurybox.client").connect
    if name == "__version__":
        return importlib.import_module("jurybox.protocol.wire").build_version()
    raise AttributeError(f"module 'jurybox' has no attribute {name!r}: it has connect and __version__")


def __dir__() -> list[str]:
    return __all__
