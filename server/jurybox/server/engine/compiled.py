"""Compiled modules that never compile while they serve: with torch.compile, or ahead of time with AOTInductor.

`torch.compile` recompiles a module for every new shape and for many other changes. In an engine that would stop every
model for seconds. So a compiled model is called with a fixed ladder of batch sizes only, and its warm-up compiles each
of them. Afterwards, any code that would need compilation runs eagerly.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from jurybox.protocol.errors import plain

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Compiled(torch.nn.Module):
    """A module behind `torch.compile`, with static shapes.

    Args:
        module: kept as `_orig_mod`, the name that torch uses.
        backend: compiles a graph; default: Inductor.

    Attributes:
        graphs: the number of compiled graphs.
        late: the number of graphs that reached the backend after `seal` and run eagerly.
    """

    def __init__(self, module: torch.nn.Module, backend: Backend | None = None) -> None:
        super().__init__()
        self._orig_mod = module
        self._backend = backend or _inductor
        self._call = torch.compile(module, dynamic=False, backend=self._compile)
        self._sealed = False
        self.graphs = self.late = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if not self._sealed:
            return self._call(*args, **kwargs)
        with _no_recompiling():
            return self._call(*args, **kwargs)

    def seal(self) -> None:
        """Compile nothing from now on."""
        self._sealed = True

    def _compile(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        if self._sealed:  # Dynamo traced the call all the same: run the graph eagerly
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
    """Make Dynamo run code eagerly where it has no compiled version; torch before 2.6 traces it first."""
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
    """A package cannot be served; the message states the reason and the remedy."""


class CompiledAhead(torch.nn.Module):
    """An AOTInductor package. It contains machine code, so no input can trigger a compilation.

    Its constants are passed by name and used in place: after new weights are written to these tensors, or after the
    tensors point to other memory and `weights_changed` is called, the next batch uses the new weights. torch before 2.8
    copies them, so that `weights_changed` must be called in both cases.

    Args:
        file: the package that `torch._inductor.aoti_compile_and_package` wrote.
        inputs: the names of the inputs, in the order of the package's arguments.
        device: the device to run on.
        constants: all weights and buffers by name; empty: those compiled into the package.

    Attributes:
        copies: whether the package copies its constants.

    Raises:
        AheadError: this torch version cannot load the package, it is for another device, or its constants have other
            names.
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
        self.copies = False
        self._tensors = {name: tensor.to(device) for name, tensor in (constants or {}).items()}
        self._load()

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Compute the outputs, in the form that the exported module returned them."""
        return self._package(*[inputs[name] for name in self._inputs])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return the constants themselves, not copies."""
        return dict(self._tensors)

    def weights_changed(self) -> None:
        """Use the memory that the tensors of `state_dict` point to now, with what it holds."""
        if self._tensors:
            now = {name: tensor.data for name, tensor in self._tensors.items()}
            try:
                self._package.load_constants(now, check_full_update=True, user_managed=True)
            except TypeError:  # torch before 2.8 has no user_managed and copies the constants
                self.copies = True
                self._wait()  # since it copies on a stream of its own
                self._package.load_constants(now, check_full_update=True)
                self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def sleep(self) -> int:
        """Move the constants to host memory and release everything else on the device; return the bytes moved."""
        self._package = None
        return self._moved(torch.device("cpu"))

    def wake(self) -> int:
        """Move the constants back and load the package again; return the bytes moved."""
        moved = self._moved(self._device)
        self._load()
        return moved

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledAhead:
        """Do nothing: device and dtype were fixed at compilation."""
        return self

    def _moved(self, device: torch.device) -> int:
        for tensor in self._tensors.values():
            tensor.data = tensor.data.to(device)
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _load(self) -> None:
        from torch import _inductor  # takes seconds to import, and only packages need it

        load = getattr(_inductor, "aoti_load_package", None)
        if load is None:
            raise AheadError(f"torch {torch.__version__} cannot load packages of AOTInductor, expected 2.6 or newer")
        # Only one thread calls a package at a time. Without synchronisation for several it can be captured in a graph.
        # Without an index it would be loaded to the first GPU. Older versions of torch take neither.
        index = -1 if self._device.index is None else self._device.index
        options, taken = {"run_single_threaded": True, "device_index": index}, inspect.signature(load).parameters
        try:
            package = load(str(self._file), **{name: value for name, value in options.items() if name in taken})
            wanted, made_for = set(package.get_constant_fqns()), package.get_metadata().get(_PLATFORM, "")
        except Exception as error:
            raise AheadError(f"not an AOTInductor package for this machine: {plain(error)}; {_HOW}") from error
        if made_for and made_for != self._device.type:
            raise AheadError(f"it was compiled for {made_for}, and this engine computes on {self._device.type}")
        if self._tensors and (missing := sorted(self._tensors.keys() - wanted)):
            raise AheadError(
                f"{', '.join(missing[:5])} of its weights were compiled into its code and can never change; {_HOW}"
            )
        if self._tensors and (unknown := sorted(wanted - self._tensors.keys())):
            raise AheadError(f"its constants {', '.join(unknown[:5])} are not among the weights given")
        self._package = package
        self.weights_changed()
