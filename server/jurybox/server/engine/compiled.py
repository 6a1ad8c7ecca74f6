"""Compiled modules that compile nothing while they serve: by torch.compile, or ahead by AOTInductor.

`torch.compile` compiles a module anew for shapes, and for much else, that it has not met. In an engine that would stop
every model for seconds. So a compiled model is called with a ladder of batch sizes only, each of which its warm-up
compiles; afterwards whatever would be compiled is computed as it is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from jurybox.protocol.errors import plain

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Compiled(torch.nn.Module):
    """A module behind `torch.compile`, with static shapes.

    Args:
        module: kept as `_orig_mod`, torch's own name for it.
        backend: compiles a graph; Inductor without it.

    Attributes:
        graphs: how many were compiled.
        late: how many would have been since it serves, and were not.
    """

    def __init__(self, module: torch.nn.Module, backend: Backend | None = None) -> None:
        super().__init__()
        self._orig_mod = module
        self._backend = backend or _inductor
        self._call = torch.compile(module, dynamic=False, backend=self._compile)
        self._sealed = False
        self.graphs = self.late = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's."""
        if not self._sealed:
            return self._call(*args, **kwargs)
        with _no_recompiling():
            return self._call(*args, **kwargs)

    def seal(self) -> None:
        """Compile nothing from now on."""
        self._sealed = True

    def _compile(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        if self._sealed:  # whatever dynamo made of the call: it is computed as it is written
            self.late += 1
            return graph.forward
        self.graphs += 1
        return self._backend(graph, examples)


def _inductor(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, list(examples))
    return cast("Callable[..., Any]", compiled)


@contextlib.contextmanager
def _no_recompiling() -> Iterator[None]:
    """Have dynamo run what it has no code for as it is written; torch before 2.6 traces it first."""
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is None:
        yield
        return
    with stance("eager_on_recompile"):
        yield


# ---- ahead of time


_PLATFORM = "AOTI_DEVICE_KEY"
_HOW = (
    "compile it with torch._inductor.aoti_compile_and_package(program, package_path=..., "
    'inductor_configs={"always_keep_tensor_constants": True})'
)


class AheadError(Exception):
    """A package cannot be served; the message says why and what to do."""


class CompiledAhead(torch.nn.Module):
    """A package of AOTInductor. It holds machine code: there is nothing that could be compiled, whatever comes.

    Its constants are given by name, and are used where they lie: who writes other weights there, or points to others
    and calls `weights_changed`, has them computed with from the next batch on.

    Args:
        file: what `torch._inductor.aoti_compile_and_package` wrote.
        inputs: their names, in the order in which it takes them.
        device: where it is to run.
        constants: all of its weights and buffers by name; empty: those that were compiled with it.

    Raises:
        AheadError: this torch cannot load it, it is for another device, or its constants have other names.
    """

    def __init__(
        self,
        file: Path,
        inputs: Sequence[str],
        device: torch.device,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._file, self._inputs, self._device = file, list(inputs), device
        self._package: Any = None
        self._tensors = {name: tensor.to(device) for name, tensor in (constants or {}).items()}
        self._load()

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Compute; outputs as the exported module's."""
        return self._package(*[inputs[name] for name in self._inputs])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The constants themselves."""
        return dict(self._tensors)

    def weights_changed(self) -> None:
        """Compute with what the tensors of `state_dict` point to now."""
        if self._tensors:
            now = {name: tensor.data for name, tensor in self._tensors.items()}
            try:
                self._package.load_constants(now, check_full_update=True, user_managed=True)
            except TypeError:  # of torch before 2.8, which copies them
                self._package.load_constants(now, check_full_update=True)

    def sleep(self) -> int:
        """Constants to host memory, and nothing else on the device."""
        self._package = None
        return self._moved(torch.device("cpu"))

    def wake(self) -> int:
        """All of it back."""
        moved = self._moved(self._device)
        self._load()
        return moved

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledAhead:
        """Where it runs, and in what, was said when it was compiled."""
        return self

    def _moved(self, device: torch.device) -> int:
        for tensor in self._tensors.values():
            tensor.data = tensor.data.to(device)
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _load(self) -> None:
        from torch import _inductor  # seconds, which others need not spend

        load = getattr(_inductor, "aoti_load_package", None)
        if load is None:
            raise AheadError(f"torch {torch.__version__} cannot load packages of AOTInductor, expected 2.6 or newer")
        try:
            package = load(str(self._file))
            wanted, made_for = set(package.get_constant_fqns()), package.get_metadata().get(_PLATFORM, "")
        except Exception as error:
            raise AheadError(f"no package of AOTInductor for this machine: {plain(error)}; {_HOW}") from error
        if made_for and made_for != self._device.type:
            raise AheadError(f"it was compiled for {made_for}, and this engine computes on {self._device.type}")
        if self._tensors and (missing := sorted(self._tensors.keys() - wanted)):
            raise AheadError(
                f"{', '.join(missing[:5])} of its weights were compiled into its code and could never change; {_HOW}"
            )
        if self._tensors and (unknown := sorted(wanted - self._tensors.keys())):
            raise AheadError(f"its constants {', '.join(unknown[:5])} are not among the weights that were given")
        self._package = package
        self.weights_changed()
