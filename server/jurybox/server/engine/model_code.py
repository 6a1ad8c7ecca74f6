"""Build a module from a model's settings: factories, exported programs, weights files, digests."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import threading
import traceback
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from jurybox.protocol.errors import Error, missing_name, plain, said
from jurybox.protocol.spec import TensorSpec
from jurybox.protocol.weights import WeightsLayout
from jurybox.server.engine.compiled import AheadError, Compiled, CompiledAhead
from jurybox.server.engine.exported import Direct, NotDirect, export, tensors_of
from jurybox.server.engine.loads import LOADS
from jurybox.server.engine.modules import alone, bare, bare_name, unready, weights_of
from jurybox.server.models import ServedModel

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep  # jurybox.server


class LoadError(Error):
    """A model could not be loaded; the message names the setting to change."""


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """The settings of [models.NAME] that an engine needs: fields of `ModelSettings`, checked by the supervisor.

    A plain dataclass, since importing the configuration's own classes would delay an engine's start by a tenth of a
    second.
    """

    factory: str | None
    exported: str | None
    args: dict[str, Any]
    weights: str | None
    max_batch: int
    min_batch: int
    max_wait_us: int
    forward_timeout: float | None
    group: str | None
    publish: str | None
    keep_versions: int
    dtype: str | None
    channels_last: bool
    compile: bool
    export: bool
    aot: bool
    cuda_graphs: bool
    deterministic: bool
    cache_mib: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    state: dict[str, TensorSpec]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelOrder:
        """Return the order in the parsed JSON of a `ModelSettings` with all its fields."""
        given = {field.name: settings[field.name] for field in fields(cls)}
        for tensors in ("inputs", "outputs", "state"):
            given[tensors] = {
                name: TensorSpec(tensor["dtype"], tuple(tensor["shape"]), tensor["capacity"], tensor["finite"])
                for name, tensor in (given[tensors] or {}).items()
            }
        return cls(**given)


class Loaded(NamedTuple):
    """A model on its device; its digest and weights layout are those before any conversion of its dtype."""

    model: ServedModel
    digest: str
    layout: WeightsLayout | None  # of published weights, in the factory's dtypes; None: no publications are accepted


def load(
    name: str,
    settings: ModelOrder,
    device: torch.device,
    factories: Collection[str] | None = None,
    changed: Callable[[list[str]], object] = lambda names: None,
    check: Callable[[torch.nn.Module], object] = lambda module: None,
) -> Loaded:
    """Build the model that `settings` describe and move it to `device`.

    Args:
        factories: the factories that the configuration names; they may be any callable. Another factory is allowed
            with its whole module, and must be defined there (or listed in `__all__`), not merely imported. None: any
            factory is allowed.
        changed: called with the names of what the factory had changed for the whole process, and was set back.
        check: called with the module that a factory has returned, before anything else happens to it.

    Raises:
        LoadError: the factory or file is missing, raises, or returns something other than a ServedModel.
    """
    if settings.aot:
        return _from_package(name, settings, device)
    if settings.factory:
        with LOADS.code(changed):
            model = _from_factory(name, settings, factories)
    else:
        model = _from_exported(name, settings, device)
    if reason := unready(model.module):
        raise LoadError(f"models.{name} cannot be served: {reason}")
    model.module = alone(model.module)
    check(model.module)
    if settings.weights:
        _load_weights(name, model.module, Path(settings.weights))
    layout = _layout_of(name, model.module) if settings.publish else None
    digits = digest(model.module)
    module = model.module.to(device).eval()
    if settings.dtype:
        module = module.to(getattr(torch, settings.dtype))
    if settings.channels_last:
        # torch's stubs know only the overloads of .to() without memory_format
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.module = _faster(name, model, module, settings, device)
    return Loaded(model, digits, layout)


def _faster(
    name: str, model: ServedModel, module: torch.nn.Module, settings: ModelOrder, device: torch.device
) -> torch.nn.Module:
    """Return the module in the form in which it is called: compiled, as a function of its operations, or as it is."""
    if settings.compile:
        return Compiled(module)
    if not settings.export and not isinstance(module, _ByName):
        return module
    compute = getattr(torch, settings.dtype) if settings.dtype else None
    most = settings.max_batch
    try:
        if model.state or any(spec.variable for spec in model.inputs.values()):
            raise NotDirect("it has state or inputs of variable size, expected rows of fixed shape")
        if isinstance(module, _ByName):
            direct = Direct(module, module.source, model.inputs, most, tensors_of(module.program))
            return direct.compare(model.inputs, most, device, compute=compute)
        return export(module, model.inputs, most, device, model.example, compute)
    except NotDirect as error:
        if settings.export:
            raise LoadError(f"models.{name}.export: {plain(error)}; serve it without export") from error
        return module


def digest(module: torch.nn.Module) -> str:
    """Return the first 16 hex digits of the SHA-256 of all parameters and buffers: name, dtype, shape and bytes."""
    sha = hashlib.sha256()
    for key, value in sorted(weights_of(module).items()):
        if value.is_quantized:
            value = value.dequantize()  # noqa: PLW2901
        sha.update(f"{key}|{value.dtype}|{list(value.shape)}|".encode())
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def _layout_of(name: str, module: torch.nn.Module) -> WeightsLayout:
    for key, value in bare(module).state_dict().items():
        if not isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            raise LoadError(
                f"models.{name}.publish: its weights {key!r} are a {type(value).__name__} and no tensors, as those of "
                "quantized layers are; serve it without publish"
            )
    try:
        return WeightsLayout.of(weights_of(module))
    except Error as error:
        raise LoadError(f"models.{name}.publish: {plain(error)}; serve it without publish") from error


def _from_factory(name: str, settings: ModelOrder, named: Collection[str] | None) -> ServedModel:
    where = f"models.{name}.factory = {settings.factory!r}"
    module_name, _, attribute = str(settings.factory).partition(":")
    try:
        module = _imported(module_name)
        factory: Callable[..., Any] | None = getattr(module, attribute, None)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = (
            f"; expected it to be installed, or in {' or '.join([*_beside_configuration, str(Path.cwd())])}"
            if missing
            else place_of(error)
        )
        raise LoadError(f"{where}: cannot import {module_name!r}: {plain(error)}{hint}") from error
    except BaseException as error:  # including SystemExit, if the module tries to exit the process
        raise LoadError(f"{where}: importing {module_name!r} raised {said(error)}{place_of(error)}") from error
    if factory is None:
        raise LoadError(f"{where}: {missing_name(module, attribute)}")
    own = attribute in getattr(module, "__all__", ()) or getattr(factory, "__module__", None) == module_name
    if named is not None and settings.factory not in named and (not own or attribute.startswith("_")):
        raise LoadError(
            f"{where}: {module_name!r} does not define {attribute!r} for others, so that {module_name}:* does not "
            f'allow it: name it in server.factories = ["{settings.factory}"]'
        )
    try:
        model = factory(**settings.args)
    except BaseException as error:
        if isinstance(error, TypeError) and not place_of(error):  # it was not called: its arguments do not fit
            raise LoadError(
                f"{where}: {plain(error)}; it takes {_signature(factory)}, models.{name}.args is {plain(settings.args)}"
            ) from error
        raise LoadError(f"{where} raised {said(error)}{place_of(error)}") from error
    if not isinstance(model, ServedModel):
        raise LoadError(f"{where} returned a {type(model).__name__}, expected jurybox.server.models.ServedModel")
    return model


def _signature(factory: Callable[..., Any]) -> str:
    try:
        return plain(inspect.signature(factory))
    except (TypeError, ValueError):  # a callable of an extension module may have no signature
        return "other arguments"


def look_in(folder: str) -> None:
    """Find modules of factories in this folder, too, before the one that the server was started in.

    So a factory is found where the files are to which `exported` and `weights` are relative: beside the configuration.
    """
    if folder and folder != str(Path.cwd()):
        _beside_configuration.append(folder)
        sys.path.insert(0, folder)


_beside_configuration: list[str] = []


def place_of(error: BaseException) -> str:
    """Return the last place in code of the user's own that an exception passed, as the end of a message, or nothing."""
    own = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _OURS)) and not _is_installed(Path(frame.filename))
    ]
    return f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""


# ---- reload code that changed since it was imported

_imported_as: dict[str, tuple[int, int]] = {}  # source file -> its mtime (ns) and size when it was imported


def _imported(name: str) -> ModuleType:
    """Import a factory's module; reload it and the user's modules around it if one of their source files has changed.

    Models in service keep the classes and functions they were built from. If the new code cannot be imported, the old
    modules stay.
    """
    module = sys.modules.get(name)
    family = _family(module) if module is not None else {}
    if module is None or not any(_changed(file) for file in family.values()):
        module = importlib.import_module(name)
        _note(module)
        return module
    before = {name: sys.modules.pop(name) for name in family}
    for file in family.values():  # Python would use a stale .pyc if the source changed within the same second
        with contextlib.suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except BaseException:
        for child in family:
            sys.modules.pop(child, None)
        sys.modules.update(before)
        for child, old in before.items():
            parent, _, attribute = child.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], attribute, old)
        raise
    _note(module)
    return module


def _family(module: ModuleType) -> dict[str, str]:
    """Return the source files of all loaded user modules in the factory's package or folder, by module name."""
    file = getattr(module, "__file__", None)
    if not file:
        return {}
    package = Path(file).name == "__init__.py"
    root = Path(file).resolve().parents[module.__name__.count(".") + package]
    if package or "." in module.__name__:
        root /= module.__name__.partition(".")[0]  # files next to a package do not belong to it
    inside, folders = str(root).rstrip(os.sep) + os.sep, dict[str, str]()
    found = {}
    for name, other in list(sys.modules.items()):
        source = getattr(other, "__file__", None)
        if not source or not source.endswith(".py") or name == "__main__" or name.partition(".")[0] == "jurybox":
            continue
        path = _resolved(source, folders)
        if path.startswith(inside) and not _is_installed(Path(path)):
            found[name] = source
    return found


def _resolved(file: str, folders: dict[str, str]) -> str:
    """Return a file's path without symbolic links; `folders` caches the resolved folders.

    PyTorch alone has a thousand modules: a Path for each would be most of the time that a small model takes to load.
    """
    folder, name = os.path.split(file)
    if os.path.islink(file):  # noqa: PTH114
        return os.path.realpath(file)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return f"{folders[folder].rstrip(os.sep)}{os.sep}{name}"


def _is_installed(path: Path) -> bool:
    foreign = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(at in path.parents for at in foreign)


def _changed(file: str) -> bool:
    seen, now = _imported_as.get(file), _stamp(file)
    return now is not None and seen is not None and now != seen


def _note(module: ModuleType) -> None:
    for file in _family(module).values():
        if (stamp := _stamp(file)) is not None:
            _imported_as[file] = stamp


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


# ---- exported programs


def _from_exported(name: str, settings: ModelOrder, device: torch.device) -> ServedModel:
    path = Path(str(settings.exported))
    where = f"models.{name}.exported = {str(path)!r}"
    if not path.is_file():
        raise LoadError(f"{where}: there is no such file; write one with torch.export.save(torch.export.export(...))")
    _refuse_objects(where, path)
    try:
        with _weights_only():
            program = torch.export.load(path)
    except Exception as error:  # such as of an operation that no imported package registers
        raise LoadError(f"{where}: torch.export.load raised {said(error)}") from error
    program = _on_device(program, device)
    arguments, keywords = program.example_inputs or ((), {})
    names = [str(name) for name in program.graph_signature.user_inputs]
    examples = dict(zip(names, arguments, strict=False)) | dict(keywords)
    inputs = settings.inputs or {key: _spec_of(where, key, value) for key, value in examples.items()}
    module = _ByName(program, [*inputs, *settings.state][: len(arguments)])
    if not inputs:
        raise LoadError(f"{where} has no example inputs: set models.{name}.inputs and .outputs in the config")
    outputs = settings.outputs or _probe_outputs(where, module, inputs, device)
    return ServedModel(module, inputs, outputs, state=settings.state)


def _on_device(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    """Move a program to a device, with the devices that its operations name: those on which it was exported.

    Without this, its module moves parameters and buffers only. That is enough for most programs, so an error here, such
    as of a torch that cannot move programs, is none: a program that needs it fails at its first batch.
    """
    if device.type != "cpu":
        with contextlib.suppress(Exception):
            from torch.export.passes import move_to_device_pass  # torch 2.6 and newer

            return move_to_device_pass(program, device)
    return program


def _from_package(name: str, settings: ModelOrder, device: torch.device) -> Loaded:
    """Load an AOTInductor package: a library for this machine, which executes code just as a factory does."""
    path = Path(str(settings.exported))
    where = f"models.{name}.exported = {str(path)!r}"
    constants = _weights_of(name, Path(settings.weights)) if settings.weights else {}
    inputs, outputs = settings.inputs, settings.outputs
    try:
        module = CompiledAhead(path, list(inputs), device, constants)
        digits = digest(module) if constants else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except (AheadError, OSError) as error:
        raise LoadError(f"{where}: {plain(error)}") from error
    layout = WeightsLayout.of(module.state_dict()) if settings.publish else None
    return Loaded(ServedModel(module, inputs, outputs), digits, layout)


# All parts of a program that hold only tensors, names and numbers. Before torch 2.8 they are in no folder.
_PLAIN = re.compile(
    r"[^/]+/(data/(weights|constants)/((weight|tensor)_\d+|model_(weights|constants)_config\.json|model\.pt)|"
    r"data/sample_inputs/model\.pt|models/model\.json|extra/[^/]+|archive_format|archive_version|byteorder|version|"
    r"\.data/\w+)|serialized_(exported_program|state_dict|constants|example_inputs)\.(json|pt)|version|extra_files/[^/]+"
)
_PROGRAM = re.compile(r"[^/]+/models/model\.json|serialized_exported_program\.json")
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_loading = threading.Lock()


def _refuse_objects(where: str, path: Path) -> None:
    """Refuse an archive with parts that torch would execute or unpickle without restrictions: objects, libraries.

    An accepted archive still is code, as a factory is: a graph names the functions that it calls.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except OSError as error:
        raise LoadError(f"{where}: cannot be read: {error.strerror}") from error
    except zipfile.BadZipFile as error:
        raise LoadError(f"{where}: not a program of torch.export: {error}") from error
    if odd := next((name for name in names if not _PLAIN.fullmatch(name)), None):
        raise LoadError(
            f"{where}: {odd!r} in it is neither tensors nor a graph, and to load it might run code: export the program "
            "without custom objects and compiled parts, or write a factory"
        )
    if not any(_PROGRAM.fullmatch(name) for name in names):
        raise LoadError(
            f"{where}: not a program of torch.export: it has no graph; write one with "
            "torch.export.save(torch.export.export(...))"
        )


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """Make torch.load refuse pickles that hold more than tensors; torch.export.load would fall back to executing them.

    It sets an environment variable, so only one thread at a time can be inside.
    """
    with _loading:
        before = os.environ.get(_WEIGHTS_ONLY)
        os.environ[_WEIGHTS_ONLY] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_WEIGHTS_ONLY]
            else:
                os.environ[_WEIGHTS_ONLY] = before


class _ByName(torch.nn.Module):
    """An exported program that is called with inputs by name, and passes the positional ones by position."""

    def __init__(self, program: torch.export.ExportedProgram, positional: list[str]) -> None:
        super().__init__()
        self.program = program.module()
        self.source = program
        self._positional = positional

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.program(*[inputs.pop(name) for name in self._positional], **inputs)

    def eval(self) -> _ByName:
        """Do nothing: an exported program has no training and evaluation modes."""
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the tensors by the names that they have in the module that was exported."""
        state: dict[str, Any] = self.program.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Take the tensors by those names."""
        return self.program.load_state_dict(*args, **kwargs)


def _spec_of(where: str, name: str, value: object) -> TensorSpec:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        raise LoadError(f"{where}: input {name!r} is {value!r}, expected tensors whose first dimension is the batch")
    return TensorSpec(str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))


def _probe_outputs(
    where: str, module: torch.nn.Module, inputs: Mapping[str, TensorSpec], device: torch.device
) -> dict[str, TensorSpec]:
    """Run two rows, then three, to find the outputs' names and shapes and to check that the batch size may vary."""
    for rows in (2, 3):
        zeros = {
            key: torch.zeros((rows, *spec.shape), dtype=getattr(torch, spec.dtype), device=device)
            for key, spec in inputs.items()
        }
        try:
            with torch.inference_mode():
                results = module(**zeros)
        except Exception as error:
            raise LoadError(
                f"{where} does not run on {rows} rows: {said(error)}; if its batch is fixed, export it with a dynamic "
                "one: dynamic_shapes={'input': {0: torch.export.Dim('batch')}}"
            ) from error
    if isinstance(results, torch.Tensor):
        results = {"output": results}
    elif not isinstance(results, Mapping):
        results = {f"output{i}": value for i, value in enumerate(results)}
    return {key: _spec_of(where, key, value) for key, value in results.items()}


def _load_weights(name: str, module: torch.nn.Module, path: Path) -> None:
    state, module = _weights_of(name, path), bare(module)
    own = module.state_dict()
    kept = {key: value for key, value in own.items() if not isinstance(value, torch.Tensor)}
    names = {bare_name(key): key for key in own}
    try:
        module.load_state_dict(kept | {names.get(bare_name(key), key): value for key, value in state.items()})
    except RuntimeError as error:
        raise LoadError(f"models.{name}.weights = {str(path)!r} does not fit the module: {plain(error)}") from error


def _weights_of(name: str, path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file."""
    try:
        state: dict[str, torch.Tensor] = load_file(path)
    except OSError as error:
        raise LoadError(f"models.{name}.weights = {str(path)!r}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        where = f"models.{name}.weights = {str(path)!r}"
        what = "not a safetensors file" if isinstance(error, SafetensorError) else "loading it raised"
        raise LoadError(f"{where}: {what}: {said(error)}") from error
    return state
