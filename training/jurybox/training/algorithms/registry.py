"""The algorithms by name. A new one is a file with a subclass of `Algorithm`, and a line of `ALGORITHMS`.

Outside this package it is the file alone, which is named "module:Class".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurybox.protocol.errors import missing_name
from jurybox.training.algorithms.base import Algorithm, AlgorithmUnusable
from jurybox.training.foreign import imported
from jurybox.training.spaces import AgentSpec

__all__ = ["ALGORITHMS", "algorithm_named", "make"]

ALGORITHMS: Mapping[str, str] = {
    "ppo": "jurybox.training.algorithms.ppo:PPO",
    "dqn": "jurybox.training.algorithms.dqn:DQN",
    "iqn": "jurybox.training.algorithms.iqn:IQN",
    "td3": "jurybox.training.algorithms.td3:TD3",
    "sac": "jurybox.training.algorithms.sac:SAC",
}
"""The built-in algorithms, "module:Class" by name."""


def algorithm_named(name: str) -> type[Algorithm]:
    """Return the class of an algorithm: one of `ALGORITHMS`, or "module:Class" of the user's own.

    Raises:
        AlgorithmUnusable: the module cannot be imported, or the class is none of `base.Algorithm`.
    """
    module, colon, attribute = ALGORITHMS.get(name, name).partition(":")
    if not colon:
        known = ", ".join(ALGORITHMS)
        raise AlgorithmUnusable(f"there is no algorithm {name!r}: expected {known}, or module:Class of your own")
    try:
        home = imported(module)
    except ModuleNotFoundError as error:
        hint = ", neither in this folder nor on PYTHONPATH" if error.name == module.partition(".")[0] else ""
        raise AlgorithmUnusable(f"the algorithm {name!r} cannot be imported: {error}{hint}") from error
    except (Exception, SystemExit) as error:
        raise AlgorithmUnusable(
            f"the algorithm {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    found = getattr(home, attribute, None)
    if found is None:
        raise AlgorithmUnusable(f"the algorithm {name!r} cannot be had: {missing_name(home, attribute)}")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise AlgorithmUnusable(
            f"{name!r} is {what}: expected a subclass of jurybox.training.algorithms.base.Algorithm"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise AlgorithmUnusable(f"the algorithm {name!r} does not define {', '.join(missing)}, which each has to")
    return found


def make(algorithm: str, settings: Mapping[str, Any], spec: Mapping[str, Any]) -> Algorithm:
    """Make an algorithm from JSON values: its name, its settings by name, and `AgentSpec.as_dict`.

    Raises:
        AlgorithmUnusable: there is none of that name, or it cannot choose such actions.
    """
    of = algorithm_named(algorithm)
    return of(of.Settings(**settings), AgentSpec.of(spec))
