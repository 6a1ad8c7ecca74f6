"""From settings to a module: factories, exported programs, weights files, digests."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from jurybox.protocol.errors import Error
from jurybox.protocol.spec import TensorSpec
from jurybox.protocol.weights import WeightsLayout
from jurybox.server.config import ModelSettings
from jurybox.server.models import ServedModel


class LoadError(Error):
    """A model could not be loaded; the message names the setting to change."""


class Loaded(NamedTuple):
    """A model ready for its device, and what it was before it was made so."""

    model: ServedModel
    digest: str
    layout: WeightsLayout | None  # as a learner publishes it, in the factory's dtypes; None: it takes no publications


def load(name: str, settings: ModelSettings, device: torch.device) -> Loaded:
    """Build the model that `settings` describe and move it to `device`.

    Raises:
        LoadError: the factory or file is missing, raises, or gives something else than a ServedModel.
    """
    model = _from_factory(name, settings) if settings.factory else _from_exported(name, settings)
    if settings.weights:
        _load_weights(name, model.module, Path(settings.weights))
    layout = WeightsLayout.of(model.module.state_dict()) if settings.publish else None
    digits = digest(model.module)
    module = model.module.to(device).eval()
    if settings.dtype:
        module = module.to(getattr(torch, settings.dtype))
    if settings.channels_last:
        # torch's stubs know only the overloads of .to() without memory_format
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.module = torch.compile(module, dynamic=True) if settings.compile else module  # type: ignore[assignment]
    return Loaded(model, digits, layout)


def digest(module: torch.nn.Module) -> str:
    """The first 16 hex digits of the SHA-256 over every parameter and buffer: name, dtype, shape, bytes."""
    sha = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        if not isinstance(value, torch.Tensor):
            continue
        sha.update(f"{key}|{value.dtype}|{list(value.shape)}|".encode())
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def _from_factory(name: str, settings: ModelSettings) -> ServedModel:
    where = f"models.{name}.factory = {settings.factory!r}"
    module_name, _, attribute = str(settings.factory).partition(":")
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise LoadError(f"{where}: cannot import {module_name!r}: {error}") from error
    except AttributeError as error:
        raise LoadError(f"{where}: module {module_name!r} has no {attribute!r}") from error
    try:
        model = factory(**settings.args)
    except TypeError as error:
        raise LoadError(
            f"{where}: {error}; it takes {inspect.signature(factory)}, models.{name}.args gives {settings.args}"
        ) from error
    except Exception as error:
        raise LoadError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, ServedModel):
        raise LoadError(f"{where} gave a {type(model).__name__}, expected jurybox.server.models.ServedModel")
    return model


def _from_exported(name: str, settings: ModelSettings) -> ServedModel:
    path = Path(str(settings.exported))
    where = f"models.{name}.exported = {str(path)!r}"
    if not path.is_file():
        raise LoadError(f"{where}: there is no such file; write one with torch.export.save(torch.export.export(...))")
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise LoadError(f"{where}: not a program of torch.export: {error}") from error
    arguments, keywords = program.example_inputs or ((), {})
    names = [str(name) for name in program.graph_signature.user_inputs]
    examples = dict(zip(names, arguments, strict=False)) | dict(keywords)
    inputs = _given(settings.inputs) or {key: _spec_of(where, key, value) for key, value in examples.items()}
    module = _ByName(program.module(), list(inputs)[: len(arguments)])
    if not inputs:
        raise LoadError(f"{where} keeps no example inputs: give models.{name}.inputs and .outputs in the config")
    outputs = _given(settings.outputs) or _probe_outputs(where, module, inputs)
    return ServedModel(module, inputs, outputs)


class _ByName(torch.nn.Module):
    """An exported program called by its inputs' names; it remembers which of them it takes by position."""

    def __init__(self, program: torch.nn.Module, positional: list[str]) -> None:
        super().__init__()
        self.program = program
        self._positional = positional

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.program(*[inputs.pop(name) for name in self._positional], **inputs)

    def eval(self) -> _ByName:
        """An exported program has no modes."""
        return self


def _given(specs: Mapping[str, Any] | None) -> dict[str, TensorSpec]:
    return {key: TensorSpec(spec.dtype, tuple(spec.shape)) for key, spec in (specs or {}).items()}


def _spec_of(where: str, name: str, value: object) -> TensorSpec:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        raise LoadError(f"{where}: input {name!r} is {value!r}, expected tensors whose first dimension is the batch")
    return TensorSpec(str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))


def _probe_outputs(where: str, module: torch.nn.Module, inputs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Run two rows to see names and shapes of the outputs; that also tells whether the batch size may vary."""
    for rows in (2, 3):
        zeros = {
            key: torch.zeros((rows, *spec.shape), dtype=getattr(torch, spec.dtype)) for key, spec in inputs.items()
        }
        try:
            with torch.inference_mode():
                results = module(**zeros)
        except Exception as error:
            raise LoadError(
                f"{where} does not run on {rows} rows: {error}; export it with a dynamic batch: "
                "dynamic_shapes={'input': {0: torch.export.Dim('batch')}}"
            ) from error
    if isinstance(results, torch.Tensor):
        results = {"output": results}
    elif not isinstance(results, Mapping):
        results = {f"output{i}": value for i, value in enumerate(results)}
    return {key: _spec_of(where, key, value) for key, value in results.items()}


def _load_weights(name: str, module: torch.nn.Module, path: Path) -> None:
    where = f"models.{name}.weights = {str(path)!r}"
    try:
        state = load_file(path)
    except Exception as error:
        raise LoadError(f"{where}: not a readable safetensors file: {error}") from error
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise LoadError(f"{where} does not fit the module: {error}") from error
