"""Makes an environment of the user's: finds its factory, tells it which of a run's environments it makes, and says what
failed. Gymnasium's and PettingZoo's are made by the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jurybox.protocol.errors import missing_name
from jurybox.training.foreign import imported


class EnvironmentUnusable(ValueError):
    """An environment cannot be made, or has unsupported spaces; the message says which."""


class EnvironmentPlace(NamedTuple):
    """Which of a run's environments one is. The names are those of RLlib's ``EnvContext``.

    Two environments of a run never have the same place, so that a factory may derive a port or a folder from it.

    Attributes:
        worker_index: 0 outside a run (a check, the look at its spaces, `jurybox policy`); workers are 1, 2, ...; the
            evaluator is the one after the last worker.
        vector_index: of the environment among those of its worker, from 0 on.
    """

    worker_index: int = 0
    vector_index: int = 0

    @property
    def keywords(self) -> dict[str, int]:
        """Return the place as keyword arguments of a factory."""
        return {"worker_index": self.worker_index, "vector_index": self.vector_index}


NOWHERE = EnvironmentPlace()


def wanted(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some keyword arguments that a callable's signature names; ``**arguments`` name none.

    Example:
        wanted(lambda worker_index: ..., EnvironmentPlace(3, 1).keywords) == {"worker_index": 3}
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # of some callables written in C
        return {}
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: value for name, value in offered.items() if name in parameters and parameters[name].kind in by_keyword
    }


def made_by(
    factory: Callable[..., Any],
    arguments: Mapping[str, Any],
    place: EnvironmentPlace,
    offered: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Call a factory, with its place if its signature names ``worker_index`` or ``vector_index``.

    Args:
        arguments: of the user's; they come before the others.
        offered: further ones that it gets if it names them.
    """
    return factory(**{**wanted(factory, {**place.keywords, **offered}), **arguments})


def make(
    name: str,
    arguments: Mapping[str, Any],
    place: EnvironmentPlace,
    expected: str,
    registered: Callable[[], Any] | None = None,
    registry: Collection[str] = (),
    offered: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Make what "module:factory" makes, whatever it is.

    Args:
        name: import path of the factory, or a name in a registry.
        arguments: keyword arguments of the factory.
        expected: what `name` may be, for messages.
        registered: makes what the name is registered for; None: nothing is registered.
        registry: names that are.
        offered: see `made_by`.

    Raises:
        EnvironmentUnusable: there is no such factory, or it failed.
    """
    module, colon, attribute = name.partition(":")
    try:
        found: Any = imported(module) if colon or registered is None else None
        factory: Any = getattr(found, attribute, None)
        known = registered is not None and (found is None or not attribute.isidentifier() or attribute in registry)
        if factory is None and not known:
            raise EnvironmentUnusable(f"{name!r} cannot be made: {missing_name(found, attribute)}")
        if callable(factory) or registered is None:
            return made_by(factory, arguments, place, offered)
        return registered()
    except EnvironmentUnusable:
        raise
    except ModuleNotFoundError as error:
        hint = ", neither in this folder nor on PYTHONPATH" if error.name == module else ""
        raise EnvironmentUnusable(f"{name!r} cannot be made: {error}{hint}") from error
    except (Exception, SystemExit) as error:
        raise EnvironmentUnusable(
            f"{name!r} cannot be made with {dict(arguments)}: {type(error).__name__}: {error}; expected {expected}; "
            "its keyword arguments are `env_args` of a training, and of `jurybox check env` --set NAME=VALUE"
        ) from error


def is_pettingzoo(made: Any) -> bool:
    """Return whether something is a PettingZoo environment, whose package may be missing."""
    return any(each.__module__.partition(".")[0] == "pettingzoo" for each in type(made).__mro__)


def places_of(worker_index: int, numbers: Sequence[int]) -> list[EnvironmentPlace]:
    """Return the places of a worker's environments of these numbers."""
    return [EnvironmentPlace(worker_index, number) for number in numbers]
