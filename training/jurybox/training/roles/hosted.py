"""Environments that a run builds once: in this process, or each worker's in a process of its own.

`Builders` is a training's end: it looks at the environments and checks them before there is a plan, and says how roles
get them. `Hosted` is a role's end.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jurybox.processes import spawn, thread_limits
from jurybox.training.environments.adapter import Array, Moved, Waiting
from jurybox.training.environments.making import EnvironmentPlace, EnvironmentUnusable, wanted
from jurybox.training.environments.stock import Stock, stocked
from jurybox.training.roles.checking import play_at_random
from jurybox.training.runtime.launching import Launcher, Local, status_of
from jurybox.training.runtime.plan import ConfigError, Kind, Plan, RoleSpec, RunError, load
from jurybox.training.spaces import AgentSpec

HOST = "jurybox.training.roles.environment_host"
_ADAPTER = f"{__name__}:Hosted"
_START_SECONDS, _END_SECONDS = 60.0, 30.0
_LOOK_SECONDS = 0.2


class HostGone(RunError):
    """The process with a worker's environments has ended."""


class _Asked:
    """A connection to the process that has a worker's environments."""

    def __init__(self, address: str) -> None:
        self._address = address
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(address)
        except OSError as error:
            end.close()
            raise self._gone() from error
        self._connection = Connection(end.detach())

    def ask(self, kind: str, what: Any, *given: Any, alive: Callable[[], None] | None = None) -> Any:
        """Send a request and return the answer; raises what the request raised. `alive` is called meanwhile."""
        try:
            self._connection.send((kind, what, given))
            while alive is not None and not self._connection.poll(_LOOK_SECONDS):
                alive()
            done, found = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if not done:
            raise found
        return found

    def close(self) -> None:
        self._connection.close()

    def _gone(self) -> HostGone:
        return HostGone(
            f"the process with these environments has ended ({self._address}): what it said last is in the run's "
            "folder, logs/environments-*.log"
        )


class Hosted:
    """The environments of a worker, which another process has, as an `Adapter`.

    Args:
        n: how many of them.
        adapter, arguments: "package.module:callable" that makes the adapter there, and its arguments.
        addresses: folder with the workers' sockets.
        places: of the environments.

    Raises:
        HostGone: that process has ended; any method.
    """

    shared = True

    def __init__(
        self, n: int, adapter: str, arguments: Mapping[str, Any], addresses: str, places: Sequence[EnvironmentPlace]
    ) -> None:
        self.n = n
        self._asked = _Asked(_address(addresses, places[0].worker_index))
        made = self._asked.ask("make", load(adapter), {"n": n, "places": list(places), **arguments})
        self.name, self.bound, self.agents = made["name"], made["bound"], made["agents"]

    def hold(self, alive: Callable[[], None]) -> list[int]:
        """Take the environments for a turn, see `adapter.Lent`."""
        found: list[int] = self._asked.ask("do", "hold", alive=alive)
        return found

    def release(self) -> None:
        """Let others have them."""
        self._asked.ask("do", "release")

    def begin(self, environment: int, seed: int) -> None:
        """Begin an episode."""
        self._asked.ask("do", "begin", environment, seed)

    def waiting(self) -> Waiting:
        """Return the agent whose turn it is."""
        found: Waiting = self._asked.ask("do", "waiting")
        return found

    def step(self, actions: Array) -> Moved:
        """Let that agent act."""
        found: Moved = self._asked.ask("do", "step", actions)
        return found

    def scripted(self, name: str, seed: int) -> Callable[[Array], Array]:
        """Return what plays an agent for one episode, see `adapter.WithBots`; it acts in this process."""
        found: Callable[[Array], Array] = self._asked.ask("do", "scripted", name, seed)
        return found

    def render(self, environment: int) -> tuple[Any, float]:
        """Return what an environment renders now, and its frames per second."""
        found: tuple[Any, float] = self._asked.ask("do", "render", environment)
        return found

    def state(self) -> dict[str, Any] | None:
        """Return what `restore` needs; None: some environment cannot be saved."""
        found: dict[str, Any] | None = self._asked.ask("do", "state")
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._asked.ask("do", "restore", state)

    def close(self) -> None:
        """Leave the environments to the others."""
        self._asked.close()


def actors(count: int, settings: Mapping[str, Any], writes: Sequence[str], reads: Sequence[str]) -> list[RoleSpec]:
    """Return the actors of a plan, `count` of them, with these settings of `EnvActor`, replays and channels."""
    make = "jurybox.training.roles.env_actor:EnvActor"
    return [
        RoleSpec(f"actor-{number}", Kind.ACTOR, make, settings, writes=tuple(writes), reads=tuple(reads))
        for number in range(count)
    ]


def evaluator(settings: Mapping[str, Any], reads: Sequence[str], every: int, nice: int = 10) -> RoleSpec:
    """Return the evaluator of a plan, with these settings of `EnvEvaluator`.

    Its priority is low: evaluations may take longer, but actors and learners have to keep their pace.
    """
    make = "jurybox.training.roles.evaluation:EnvEvaluator"
    return RoleSpec("evaluator", Kind.EVALUATOR, make, settings, reads=tuple(reads), evaluate_every=every, nice=nice)


class Builders:
    """How a training gets its environments; this one builds them wherever they are needed.

    Args:
        looked_at: keeps the environment that is looked at and checked before the run; None: each look builds one.

    Attributes:
        shared: whether each is built once.
        keeps: whether looks find the environment in a stock.
    """

    shared = False

    def __init__(self, looked_at: Stock | None = None) -> None:
        self._looked_at, self.keeps = looked_at, looked_at is not None

    def call(self, look: Callable[..., Any], *given: Any) -> Any:
        """Call a function of a module where the first worker's environments are; raises what it raises."""
        return look(*given)

    def adapter(self, adapter: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the adapter and the arguments that roles are to use."""
        return adapter, dict(arguments)

    def check(self, planned: Plan, steps: int) -> None:
        """Play the environments of a plan at random; then what was built for looks alone is closed.

        Args:
            planned: of actors that are `env_actor.EnvActor`.
            steps: how many; 0: none.

        Raises:
            ConfigError: no training can be in them; the message says what came and what was expected.
        """
        played = planned.roles[planned.of_kind(Kind.ACTOR)[0]].settings
        specs = {name: AgentSpec.of(each["spec"]).action for name, each in played["algorithms"].items()}
        actions = {agent: specs[name] for agent, name in played["policies"].items()}
        adapter, arguments = played["adapter"], played["arguments"]
        if adapter == _ADAPTER:
            adapter, arguments = arguments["adapter"], arguments["arguments"]
        if self.keeps:
            arguments = {**arguments, **wanted(load(adapter), {"shared": True})}
        try:
            if steps:
                self.call(play_at_random, adapter, arguments, self.place, actions, steps, planned.seed)
        except EnvironmentUnusable as error:
            name = arguments.get("env") or "the environment"
            raise ConfigError(
                f"{name} cannot be trained in: {error}. It was played at random before the training, at most "
                f"{steps} steps (check_steps); `jurybox check env` looks further"
            ) from error
        if self._looked_at is not None:
            self._looked_at.close()

    @property
    def place(self) -> EnvironmentPlace:
        """The place of the environment that is looked at."""
        return EnvironmentPlace(1, 0) if self.shared else EnvironmentPlace()


class _Here(Builders):
    """All environments are in this process."""

    shared = True

    def __init__(self) -> None:
        super().__init__()
        self.keeps = True

    def adapter(self, adapter: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return adapter, {**arguments, "shared": True}


class _Away(Builders):
    """Each worker's environments are in a process of their own."""

    shared = True

    def __init__(self, workers: int, logs: Path, resources: ExitStack) -> None:
        super().__init__()
        self.keeps = True
        # Not in the run's folder: the path of a socket has 107 characters at most.
        self._folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="jurybox-"))
        logs.mkdir(parents=True, exist_ok=True)
        for worker in range(1, workers + 1):
            resources.enter_context(_host(_address(self._folder, worker), logs / f"environments-{worker}.log"))
        self._asked = _Asked(_address(self._folder, 1))
        resources.callback(self._asked.close)

    def call(self, look: Callable[..., Any], *given: Any) -> Any:
        return self._asked.ask("call", look, *given)

    def adapter(self, adapter: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        there = {"adapter": adapter, "arguments": {**arguments, "shared": True}}
        return _ADAPTER, {**there, "addresses": self._folder}


@contextmanager
def builders(
    once: bool, workers: int, logs: Path, launcher: Launcher | None = None, *, serial: bool
) -> Iterator[Builders]:
    """Return how a training gets its environments until the end of the ``with`` block.

    Args:
        once: whether each is built once.
        workers: actors that have some.
        logs: folder for what the environments print.
        launcher: of the run; None: this machine.
        serial: whether the run is in this process.

    Raises:
        ConfigError: the run is on other machines, where none can be built once.
    """
    with ExitStack() as resources:
        if not once:
            yield Builders(resources.enter_context(stocked()))
        elif launcher is not None and not isinstance(launcher, Local):
            raise ConfigError("build_once with --launcher ray: expected a run on this machine; leave one of them out")
        elif serial:
            resources.enter_context(stocked())
            yield _Here()
        else:
            yield _Away(workers, logs, resources)


@contextmanager
def _host(address: str, log: Path) -> Iterator[None]:
    with log.open("ab") as file:
        process, control_pipe = spawn(HOST, environment=thread_limits(1), output=file.fileno())
    try:
        try:
            control_pipe.send("configure", path=sys.path, address=address)
            started = control_pipe.receive(_START_SECONDS) is not None
        except (EOFError, OSError):
            started = False
        if not started:
            raise HostGone(f"the process for environments has not started within {_START_SECONDS:g} s (log: {log})")
        yield
    finally:
        control_pipe.close()
        status_of(process, _END_SECONDS)


def _address(folder: str, worker: int) -> str:
    return str(Path(folder) / str(worker))
