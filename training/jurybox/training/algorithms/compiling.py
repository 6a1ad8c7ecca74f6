"""Updates as compiled graphs: what an update computes is traced once, with its gradients and optimisers, and compiled.

Small networks spend most of an update between the operations of PyTorch, not in them. The trace is of ordinary PyTorch
code, which also runs as it is: there is one implementation of each algorithm, and its gradients are autograd's. torch's
inductor makes C++ of it, which needs a compiler once; results of the compiler are kept on disk and found again.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TRACING", "Adam", "CompileStopped", "CompiledStep", "PlainAdam", "compiler_missing"]

TRACING = threading.local()
"""Has `on` True in a thread that traces a step."""

Step = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

_log = logging.getLogger("jurybox.learner")
_ALIVE_EVERY = 0.25  # seconds between two signs of life while a compiler works, and two looks whether it may go on


class PlainAdam(torch.optim.Adam):
    """torch's own, without a decorator that imports its compiler at the first call, two seconds of a core a process."""

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class Adam(PlainAdam):
    """Adam of one group of parameters on one device, whose step can be a part of a `CompiledStep`.

    Its state has torch's names, exists from the start, and is changed in place.

    Attributes:
        rate: the learning rate, float64 (); change it in place.
    """

    def __init__(
        self, parameters: Any, rate: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.rate = torch.tensor(rate, dtype=torch.float64)
        super().__init__(list(parameters), self.rate, betas, eps, fused=True)
        (group,) = self.param_groups
        self._betas, self._eps, self._parameters = betas, eps, group["params"]
        group["lr"] = self.rate
        for each in self._parameters:
            self.state[each] = {
                "step": torch.zeros((), dtype=torch.float32, device=each.device),
                "exp_avg": torch.zeros_like(each),
                "exp_avg_sq": torch.zeros_like(each),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; one without a parameter's numbers is that of an optimiser before its first step."""
        with torch.no_grad():
            for number, parameter in enumerate(self._parameters):
                given = state_dict["state"].get(number, {})
                for name, mine in self.state[parameter].items():
                    mine.copy_(torch.as_tensor(given[name])) if name in given else mine.zero_()

    @torch.no_grad()
    def traced_step(self, gradients: Sequence[Tensor]) -> None:
        """The same as `step`, in operations that a compiler merges, parameter by parameter, with what makes gradients.

        Args:
            gradients: of the parameters, in their order.
        """
        first, second = self._betas
        states = [self.state[each] for each in self._parameters]
        torch._foreach_add_([state["step"] for state in states], 1)
        steps = states[0]["step"].double()
        size = (self.rate / (1 - first**steps)).float()
        root = (1 - second**steps).sqrt().float()
        for value, gradient, state in zip(self._parameters, gradients, states, strict=True):
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(gradient, 1 - first)
            square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            value.sub_(size * mean / (square.sqrt() / root + self._eps))


def compiler_missing() -> str | None:
    """Return why nothing can be compiled here; None: there is a C++ compiler."""
    chosen = os.environ.get("CXX", "g++")
    if shutil.which(chosen) is None:
        return f"there is no C++ compiler {chosen!r}: install g++ or set CXX"
    return None


class CompileStopped(Exception):
    """The run stops, or pauses, while a step is compiled; nothing has changed."""


class CompiledStep:
    """A step of an algorithm, which is traced and compiled at its first call for tensors of such shapes.

    Tensors that the step uses beside its arguments, such as parameters and the optimisers' numbers, are part of the
    graph by reference: they have to be changed in place.

    Args:
        step: takes and returns tensors by name. It has no random numbers and no branches on values.
        alive: called now and then while a compiler works.
        stops: whether the run waits for the end of the step, asked as often, by another thread: then the compiler,
            which may work for a minute where others have the cores, is killed.

    Attributes:
        ran: whether it has run: then an error may have come amid changes.

    Raises:
        CompileStopped: by a call that `stops`; the next one may compile.
        Exception: by a call, of any kind, while it has not `ran`: it cannot be traced or compiled.
    """

    def __init__(
        self, step: Step, alive: Callable[[], None] = lambda: None, stops: Callable[[], bool] = lambda: False
    ) -> None:
        self._step, self._alive, self._stops = step, alive, stops
        self._made: dict[Any, Callable[[list[Tensor]], dict[str, Tensor]]] = {}
        self.ran = False

    def __call__(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names, tensors = tuple(given), list(given.values())
        key = names, tuple((each.dtype, each.shape, each.stride()) for each in tensors)
        made = self._made.get(key)
        if made is None:
            try:
                made = self._made[key] = self._compiled(names, tensors)
            except Exception as error:
                if self._stops():
                    raise CompileStopped from error
                raise
        self.ran = True
        return made(tensors)

    def _compiled(self, names: tuple[str, ...], tensors: list[Tensor]) -> Callable[[list[Tensor]], dict[str, Tensor]]:
        began = monotonic()
        if self._stops():
            raise CompileStopped
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # torch sets its own default at its first import, a folder in /tmp; one that a user has set stays.
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_cache())

        results: list[str] = []

        def flat(*values: Tensor) -> list[Tensor]:
            found = self._step(dict(zip(names, values, strict=True)))
            results[:] = found
            return [each.detach() for each in found.values()]

        with _calls(self._watch, _children(os.getpid())):
            if self._stops():  # the imports have taken seconds
                raise CompileStopped
            graph, state = _lifted(_traced(flat, tensors))
            if self._stops():
                raise CompileStopped
            settings = {"cpp_wrapper": True, "compile_threads": 1, "cpp.threads": torch.get_num_threads()}
            # Without an environment of shapes torch keeps no graph, and generates its C++ anew each time.
            shapes = tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv())))
            with torch.no_grad(), config.patch(settings), shapes:
                call: Any = compile_fx(graph, [*state, *tensors])
        _log.info("compiled %s in %.1f s", getattr(self._step, "__name__", "a step"), monotonic() - began)

        def run(now: list[Tensor]) -> dict[str, Tensor]:
            with torch.no_grad():
                return dict(zip(results, call(*state, *now), strict=True))

        return run

    def _watch(self, others: Collection[int]) -> None:
        """Give a sign of life; if the run stops, kill the compilers: the children that are not `others`."""
        self._alive()
        if self._stops():
            folder = os.fsencode(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            for child in _children(os.getpid()) - set(others):
                with suppress(OSError):  # it has ended
                    if folder in Path(f"/proc/{child}/cmdline").read_bytes():
                        for each in (*_descendants(child), child):  # g++'s own child has the pipe that is read
                            os.kill(each, signal.SIGKILL)


def _children(of: int) -> set[int]:
    """Return the process ids of a process's children."""
    found: set[int] = set()
    for each in Path(f"/proc/{of}/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended
            found |= set(map(int, each.read_text().split()))
    return found


def _descendants(of: int) -> list[int]:
    return [each for child in _children(of) for each in (*_descendants(child), child)]


def _cache() -> Path:
    """The folder of what was compiled, the user's own: what lies in it is run."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "jurybox" / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _traced(function: Callable[..., list[Tensor]], tensors: list[Tensor]) -> torch.fx.GraphModule:
    """Trace a function with its gradients. Nothing has changed afterwards."""
    from torch.fx.experimental.proxy_tensor import make_fx

    TRACING.on = True
    try:
        with _ChangesNothing():  # type: ignore[no-untyped-call]
            traced: torch.fx.GraphModule = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    finally:
        TRACING.on = False
    return traced


class _ChangesNothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Undoes what a trace carries out: an operation that changes a tensor from outside of it by a known number.

    ``square.mul_(0.999)`` would decay the square once more than the step says.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written: list[Tensor] = []
        if func._schema.is_mutable:
            for each, argument in zip(args, func._schema.arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written += each if isinstance(each, list | tuple) else [each]
        real = [each for each in written if type(each) in (Tensor, torch.nn.Parameter)]
        with _disable_current_modes():
            before = [each.detach().clone() for each in real]
        found = func(*args, **(kwargs or {}))
        with _disable_current_modes(), torch.no_grad():
            for each, value in zip(real, before, strict=True):
                each.detach().copy_(value)
        return found


def _lifted(traced: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Make arguments of the tensors that a graph holds; returns it and them, which come before its own arguments."""
    graph, held = traced.graph, dict[str, torch.fx.Node]()
    state: list[Tensor] = []
    first = next(iter(graph.nodes))
    for node in list(graph.nodes):
        node.meta.clear()  # with the tensors of the trace, which the compiler would mistake for its own
        if node.op == "get_attr":
            name = str(node.target)
            if name not in held:
                with graph.inserting_before(first):
                    held[name] = graph.placeholder(f"held_{len(held)}")
                state.append(getattr(traced, name).detach())
            node.replace_all_uses_with(held[name])
            graph.erase_node(node)
    return torch.fx.GraphModule(torch.nn.Module(), graph), state


@contextmanager
def _calls(function: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Call a function several times a second, from a thread of its own."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(_ALIVE_EVERY):
            function(*arguments)

    thread = threading.Thread(target=go_on, name="alive while compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
