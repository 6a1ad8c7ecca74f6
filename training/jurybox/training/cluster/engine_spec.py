"""What an engine in a cluster is to be: plain data. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Models = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Feeds:
    """What of a run goes where.

    Attributes:
        channels: by the run's channel, the model that is to have its newest weights; versions are the channel's.
        folders: by the run's folder with a file VERSION.weights for each policy that stays (a state with "state"), the
            model that is to hold them as versions.
        most: of them, the newest, that a server is given which has none yet.
    """

    channels: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    most: int = 32


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine, and what of a run it serves.

    Attributes:
        name: by which it is found.
        models: as under [models.NAME] of a server's configuration.
        feeds: what of the run it serves.
        cpus, gpus, resources: that Ray sets aside for it. With a GPU it serves on that, else on the CPU.
        threads: that torch may use in it.
        server: further settings of its [server].
    """

    name: str
    models: Models
    feeds: Feeds = field(default_factory=Feeds)
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1
    server: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Serves(Protocol):
    """A launcher that places engines, too."""

    def serve(self, spec: EngineSpec, log: Path) -> None:
        """Have an engine beside the next run; the log of its server goes to a file on this machine."""
