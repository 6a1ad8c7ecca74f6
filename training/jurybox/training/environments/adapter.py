"""What plays in environments asks of them: one interface, whether Gymnasium's or PettingZoo's.

An adapter holds `n` environments of one kind, each with the same agents. One agent at a time acts, in all of them; an
environment whose episode is over rests until the next is begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from jurybox.training.environments.making import places_of, wanted

Array = npt.NDArray[Any]


class Waiting(NamedTuple):
    """The agent whose turn it is.

    Attributes:
        agent: its name; "" if there is one alone.
        observation: (n, ...) by input, as the environments gave them, and "action_mask", if the policy takes masks;
            valid until the next step.
        rows: (n, ...) the same as a replay holds it.
        others: agents whose turns follow before anything happens: their actions may be computed at the same time.
    """

    agent: str
    observation: Mapping[str, Any]
    rows: Array
    others: Sequence[Waiting] = ()


class Result(NamedTuple):
    """What came of an agent's last action; of an agent that has not acted yet, of what the others did.

    Attributes:
        reward: float64 (n,); 0 in environments that rest.
        terminated, truncated: bool (n,), the agent's own episode.
        rows: (n, ...) what it observes now, as a replay holds it.
        infos: of each environment.
        mask: bool (n, actions), of what it may choose now; None: the policy takes no masks.
        acted: bool (n,), whether an action was taken there; where not, there is no row. None: everywhere.
        score: float64 (n,), what returns are reported of, where that is not the reward that is learned from; else None.
    """

    agent: str
    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    rows: Array
    infos: Sequence[Mapping[str, Any]]
    mask: Array | None = None
    score: npt.NDArray[np.float64] | None = None
    acted: npt.NDArray[np.bool_] | None = None


class Moved(NamedTuple):
    """What happened until the next agent's turn.

    Attributes:
        results: in order.
        steps: environment steps that were completed; where agents take turns, a step is a turn of all.
        over: environments whose episodes are over for all agents.
        numbers: of these episodes, by environment, beside return and length: {3: {"wins": 1.0}}.
    """

    results: Sequence[Result]
    steps: int
    over: Sequence[int]
    numbers: Mapping[int, Mapping[str, float]] = MappingProxyType({})


class Adapter(Protocol):
    """`n` environments. A module's callable makes one: ``make(n=..., **arguments)``, and `places` if it names them."""

    @property
    def name(self) -> str:
        """What messages call the environment."""

    @property
    def bound(self) -> str:
        """What to do if its episodes do not end, for messages."""

    @property
    def n(self) -> int:
        """Number of environments."""

    @property
    def agents(self) -> Sequence[str]:
        """Names of the agents."""

    def begin(self, environment: int, seed: int) -> None:
        """Begin an episode. Raises ContractBroken: the environment did not return what it has to."""

    def waiting(self) -> Waiting:
        """Return the agent whose turn it is; all environments have been begun at least once."""

    def step(self, actions: Array) -> Moved:
        """Let that agent act: actions (n, ...), as an algorithm chooses them. Raises ContractBroken, see `begin`."""

    def close(self) -> None:
        """Close the environments."""


def made_adapter(make: Callable[..., Any], arguments: Mapping[str, Any], worker: int, numbers: Sequence[int]) -> Any:
    """Return the adapter of a worker's environments of these numbers; it is told their places if it wants to know."""
    places = wanted(make, {"places": places_of(worker, numbers)})
    return make(n=len(numbers), **places, **arguments)


class WithBots(Adapter, Protocol):
    """An adapter some of whose agents may be played by bots, as a `Task` says."""

    def scripted(self, name: str, seed: int) -> Callable[[Array], Array]:
        """Return what plays an agent for one episode: from its observation to its action.

        Raises:
            KeyError: there is no bot of that name.
        """


@runtime_checkable
class Lent(Adapter, Protocol):
    """An adapter whose environments others may have, too, by turns: `hold` comes before a turn, `release` after it.

    Attributes:
        shared: whether that is so; else the environments are its own.
    """

    shared: bool

    def hold(self, alive: Callable[[], None]) -> Sequence[int]:
        """Wait until nobody else holds the environments; return those whose episodes others have broken off.

        Args:
            alive: called again and again while it waits.
        """

    def release(self) -> None:
        """Let others have the environments."""


@runtime_checkable
class WithState(Adapter, Protocol):
    """An adapter whose environments may save themselves: a resumed run then goes on in the midst of their episodes."""

    def state(self) -> dict[str, Any] | None:
        """Return what `restore` needs, as `checkpoints.write_state` takes it; None: some environment cannot be saved.

        It changes nothing. All environments have been begun.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, before the first step: no episode is begun then."""


SAVES = ("episode_state", "restore_episode")


def can_be_saved(env: object) -> bool:
    """Return whether an environment has the methods `SAVES` itself; of a wrapped one, its outermost wrapper.

    A wrapper that passes on those of what it wraps would lose its own state.
    """
    return all(hasattr(type(env), name) for name in SAVES)
