"""The algorithms by name. A new one is a file with a subclass of `Algorithm`, and a line of `ALGORITHMS`.

Outside this package it is the file alone, which is named "module:Class".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jurybox.protocol.errors import missing_name
from jurybox.training.algorithms.base import Algorithm, AlgorithmUnusable, Array, Progress, expected, torch
from jurybox.training.foreign import imported
from jurybox.training.spaces import MEMORY, AgentSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ALGORITHMS", "algorithm_named", "make", "tried"]

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


def tried(algorithm: Algorithm, rows: Array) -> nn.Module:
    """Create the network that acts, and choose actions by its outputs once, with exploration and without.

    Args:
        rows: two or more observations, as a replay holds them.

    Raises:
        AlgorithmUnusable: outputs, actions or columns are others than the algorithm says and its actions need.
    """
    name, n, action = type(algorithm).__name__, len(rows), algorithm.spec.action
    mask = np.zeros((n, action.size), np.bool_)
    mask[:, np.cumsum(action.counts or (action.size,)) - 1] = True  # of each choice the last action alone
    network: nn.Module = algorithm.seeded(algorithm.network, 0)
    memory = np.zeros((n, algorithm.remembers), np.float32)
    more = [*([mask] if algorithm.spec.masked else []), *([memory] if algorithm.remembers else [])]
    with torch.inference_mode():
        found = network(*map(torch.from_numpy, (rows, *more)))
    tensors = found if isinstance(found, tuple) else (found,)
    named = {**algorithm.outputs, **({MEMORY: (algorithm.remembers,)} if algorithm.remembers else {})}
    if len(tensors) != len(named):
        and_memory = f", and `remembers` is {algorithm.remembers}" if algorithm.remembers else ""
        raise AlgorithmUnusable(
            f"the network of {name} returns {len(tensors)} tensors, and `outputs` names "
            f"{', '.join(algorithm.outputs)}{and_memory}"
        )
    outputs = {}
    for (output, shape), tensor in zip(named.items(), tensors, strict=True):
        outputs[output] = expected(f"the output {output!r} of the network", tensor.numpy(), (n, *shape), "f")
    if algorithm.chooses[0] not in outputs:
        raise AlgorithmUnusable(f"`chooses` of {name} names {algorithm.chooses[0]!r}, expected one of {list(outputs)}")
    algorithm.check_metrics("exploration", algorithm.exploration(Progress(0, 1)))
    chosen, columns = algorithm.explore(outputs, np.random.default_rng(0), Progress(0, 1))
    for method, actions in (("explore", chosen), ("greedy", algorithm.greedy(outputs))):
        algorithm.checked(f"{name}.{method}", actions, n, mask if algorithm.spec.masked else None)
    if columns.keys() != algorithm.columns.keys():
        raise AlgorithmUnusable(
            f"{name}.explore returns the columns {list(columns)}, and `columns` names {list(algorithm.columns)}"
        )
    for column, shape in algorithm.columns.items():
        expected(f"the column {column!r} of {name}.explore", columns[column], (n, *shape), "f")
    return network
