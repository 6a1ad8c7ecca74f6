"""Environments that a process keeps: each is made once, and its users have it by turns.

For what can be there only once, such as a simulator on a fixed port: a look at its spaces, its check, the training and
its evaluations use the same one. Whoever begins an episode in it has it then; an episode that another had begun is
broken off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any


class Kept:
    """An environment of a `Stock`.

    Attributes:
        env: it.
        user: who began an episode in it last.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.user: object = None


class Stock:
    """Environments by what they are made of; closed together.

    Example:
        with stocked() as stock:
            assert stock.get(["CartPole-v1"], make) is stock.get(["CartPole-v1"], make)
    """

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}
        self._resources = ExitStack()

    def get(self, made_of: Sequence[Any], make: Callable[[], Any]) -> Kept:
        """Return the environment that is made of these values (of JSON); it is made if there is none yet."""
        key = json.dumps(made_of, sort_keys=True, default=repr)
        if key not in self._kept:
            env = make()
            self._resources.callback(env.close)
            self._kept[key] = Kept(env)
        return self._kept[key]

    def close(self) -> None:
        """Close all environments."""
        self._kept.clear()
        self._resources.close()


_stocks: list[Stock] = []  # of runs in this process; the innermost one is used


@contextmanager
def stocked() -> Iterator[Stock]:
    """Keep environments in this process until the end of the ``with`` block."""
    stock = Stock()
    _stocks.append(stock)
    try:
        yield stock
    finally:
        _stocks.remove(stock)
        stock.close()


def kept(made_of: Sequence[Any], make: Callable[[], Any], *, shared: bool) -> Kept:
    """Return an environment: of this process's stock where it is shared, else one of its own.

    Raises:
        RuntimeError: it is shared, and the process has no stock.
    """
    if not shared:
        return Kept(make())
    if not _stocks:
        raise RuntimeError("no stock of environments in this process: expected a call within `stocked()`")
    return _stocks[-1].get(made_of, make)
