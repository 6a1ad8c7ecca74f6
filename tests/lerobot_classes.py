"""Stand-ins for the three classes of LeRobot whose pickles its robots send, under LeRobot's module names."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType
from typing import Any

NEW, OLD = "lerobot.async_inference.helpers", "lerobot.scripts.server.helpers"


@contextmanager
def lerobot_classes(name: str):
    """Yield a module with the classes, which pickles find meanwhile."""
    module: Any = ModuleType(name)
    timed = [("timestamp", float), ("timestep", int)]
    module.TimedAction = make_dataclass("TimedAction", [*timed, ("action", Any)])
    module.TimedObservation = make_dataclass(
        "TimedObservation", [*timed, ("observation", dict), ("must_go", bool, field(default=False))]
    )
    module.RemotePolicyConfig = make_dataclass(
        "RemotePolicyConfig",
        [
            *(("policy_type", str), ("pretrained_name_or_path", str)),
            *(("lerobot_features", dict), ("actions_per_chunk", int)),
            *(("device", str, "cpu"), ("rename_map", dict, field(default_factory=dict))),
        ],
    )
    module.Other = dataclass(type("Other", (), {"__annotations__": {"value": int}}))
    parts = name.split(".")
    names = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    before = {one: sys.modules.get(one) for one in names}
    sys.modules.update({one: ModuleType(one) for one in names[:-1]} | {name: module})
    for kind in (module.TimedAction, module.TimedObservation, module.RemotePolicyConfig, module.Other):
        kind.__module__ = name
    try:
        yield module
    finally:
        for one, old in before.items():
            if old is None:
                del sys.modules[one]
            else:
                sys.modules[one] = old
