"""What code of others changes for a whole process: PyTorch's default dtype and device, error states, the folder, ...

Such a change alters what other code of the process computes. `kept` runs code and sets back what it has changed.
Neither torch nor NumPy is imported here: their state is looked at if the process has imported them.
"""

from __future__ import annotations

import contextlib
import locale
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple


class _ProcessState(NamedTuple):
    """A state of the process.

    Attributes:
        name: what it is, for messages.
        module: the module that has it; it is not looked at before that is imported.
        get, set: read and write it. The module is passed to both.
        initial: its value in a module that has just been imported; None: unknown.
        slow: whether it takes a tenth of a millisecond to read.
    """

    name: str
    module: str
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]
    initial: Callable[[Any], Any] | None = None
    slow: bool = False


def _folder(_: Any) -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return None


def _enter(_: Any, folder: str | None) -> None:
    if folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(folder)


def _raising(_: Any) -> list[Any]:
    """Return the filters that make errors of warnings. Others change no answers, and many imports add some."""
    return [each for each in warnings.filters if each[0] == "error"]


def _raise_only(_: Any, wanted: list[Any]) -> None:
    rest = [each for each in warnings.filters if each[0] != "error"]
    warnings.resetwarnings()  # decisions that are cached end, too
    warnings.filters.extend([*wanted, *rest])  # type: ignore[attr-defined]


def _device(torch: Any) -> Any:
    get = getattr(torch, "get_default_device", None)  # torch 2.3 and newer
    return get() if get is not None else torch.empty(0).device


# Where torch keeps how exactly float32 is computed. torch before 2.9 has other names for it, which later ones refuse to
# read once these have been set.
_EXACTNESS = (
    "",
    "cuda.matmul",
    "cudnn",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
_EARLIER = ("cuda.matmul.allow_tf32", "cudnn.allow_tf32")
_CUDNN = ("cudnn.benchmark", "cudnn.deterministic")


def _precision(torch: Any) -> dict[str, Any]:
    later = hasattr(torch.backends.cuda.matmul, "fp32_precision")
    names = [f"{place}.fp32_precision".lstrip(".") for place in _EXACTNESS] if later else list(_EARLIER)
    found: dict[str, Any] = {"": None}
    with contextlib.suppress(RuntimeError):  # refused after a change by the later names
        found[""] = torch.get_float32_matmul_precision()
    for name in (*names, *_CUDNN):
        with contextlib.suppress(AttributeError):
            found[name] = attrgetter(name)(torch.backends)
    return found


def _set_precision(torch: Any, wanted: dict[str, Any]) -> None:
    if wanted[""] is not None:
        torch.set_float32_matmul_precision(wanted[""])
    for name, value in wanted.items():
        if name:
            place, _, attribute = name.rpartition(".")
            setattr(attrgetter(place)(torch.backends) if place else torch.backends, attribute, value)


_STATES = (
    _ProcessState("the working directory", "os", _folder, _enter),
    _ProcessState(
        "the locale",
        "locale",
        lambda _: locale.setlocale(locale.LC_ALL),
        lambda _, was: locale.setlocale(locale.LC_ALL, was),
    ),
    _ProcessState("which warnings are errors", "warnings", _raising, _raise_only),
    _ProcessState(
        "NumPy's error state",
        "numpy",
        lambda numpy: numpy.geterr(),
        lambda numpy, was: numpy.seterr(**was),
        lambda _: {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
    ),
    _ProcessState(
        "torch's default dtype",
        "torch",
        lambda torch: torch.get_default_dtype(),
        lambda torch, was: torch.set_default_dtype(was),
        lambda torch: torch.float32,
    ),
    _ProcessState(
        "torch's default device",
        "torch",
        _device,
        lambda torch, was: torch.set_default_device(None if was.type == "cpu" else was),
        lambda torch: torch.device("cpu"),
    ),
    _ProcessState(
        "torch's grad mode",
        "torch",
        lambda torch: torch.is_grad_enabled(),
        lambda torch, was: torch.set_grad_enabled(was),
        lambda _: True,
    ),
    _ProcessState(
        "torch's number of threads",
        "torch",
        lambda torch: torch.get_num_threads(),
        lambda torch, was: torch.set_num_threads(was),
    ),
    _ProcessState(
        "torch's deterministic algorithms",
        "torch",
        lambda torch: torch.are_deterministic_algorithms_enabled(),
        lambda torch, was: torch.use_deterministic_algorithms(was),
        lambda _: False,
    ),
    _ProcessState("torch's precision of matrix products", "torch", _precision, _set_precision, slow=True),
)


_UNKNOWN = object()


def _read(state: _ProcessState, module: Any) -> Any:
    """Return a state; _UNKNOWN if its module does not tell it, as while it is being imported."""
    try:
        return state.get(module)
    except Exception:  # noqa: BLE001
        return _UNKNOWN


class Surroundings:
    """The state of this process and thread at one moment.

    Example:
        before = Surroundings()
        run_code_of_others()
        changed = before.restore()  # such as ["torch's default dtype"]
    """

    def __init__(self) -> None:
        self._were = {
            state.name: value
            for state in _STATES
            if (module := sys.modules.get(state.module)) and (value := _read(state, module)) is not _UNKNOWN
        }

    def restore(self, *, slow: bool = True) -> list[str]:
        """Set back what has changed since; return its names. `slow`: also of what takes longer to look at."""
        changed = []
        for state in _STATES:
            module = sys.modules.get(state.module)
            if module is None or (state.slow and not slow):
                continue
            if state.name in self._were:
                was = self._were[state.name]
            elif state.initial is not None and hasattr(module, "__version__"):  # it was imported meanwhile
                was = state.initial(module)
            else:
                continue
            now = _read(state, module)
            if now is not _UNKNOWN and now != was:
                with contextlib.suppress(Exception):  # whatever others have done to it: the rest is set back
                    state.set(module, was)
                changed.append(state.name)
        return changed


@contextlib.contextmanager
def kept(changed: Callable[[list[str]], object] = lambda names: None) -> Iterator[None]:
    """Run the block, and set back what it changes for the rest of this process, also if it raises.

    Args:
        changed: called with the names of what was set back, if there are any.
    """
    before = Surroundings()
    try:
        yield
    finally:
        if names := before.restore():
            changed(names)
