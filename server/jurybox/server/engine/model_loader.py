"""The model loader: a thread that loads models, warms them up and passes them to the engine's loop.

The supervisor creates the arena, for which it needs the model's spec, so a load has two halves: load the model and
report its spec; then, with the arena's name, attach, warm up and install.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from jurybox.processes.surroundings import kept
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.device_memory import FAKE
from jurybox.protocol.errors import Error, said
from jurybox.protocol.spec import BYTES, plain_specs
from jurybox.protocol.weights import WeightsChannel
from jurybox.server.engine.compiled import Compiled
from jurybox.server.engine.core import Engine
from jurybox.server.engine.device import DeviceLost, DeviceServed, device_error, use_device
from jurybox.server.engine.device_regions import DeviceRegions
from jurybox.server.engine.graphs import ladder
from jurybox.server.engine.model_code import LoadError, ModelOrder, place_of
from jurybox.server.engine.model_code import load as load_model
from jurybox.server.engine.modules import bare, storages, views_of_weights
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.engine.response_cache import ResponseCache
from jurybox.server.engine.served import Served
from jurybox.server.engine.weights_updater import WeightsUpdater
from jurybox.server.groups.group import Member
from jurybox.server.groups.groups import Groups
from jurybox.server.logs import traced
from jurybox.server.models import ServedModel
from jurybox.server.shadows import shadowing

_HELD = 5.0  # seconds for which the loop is held at most, and for which this thread waits for that


@contextlib.contextmanager
def held(later: Callable[[Callable[[], None]], None], finish: Callable[[], None]) -> Iterator[None]:
    """Hold the engine's loop between two turns during the block, with no batch in flight.

    Neither side waits for the other longer than _HELD: the block then runs beside the loop.

    Args:
        later: runs an action in the loop's thread between two turns.
        finish: answers the batches in flight; called in the loop's thread.
    """
    reached, left = threading.Event(), threading.Event()

    def hold() -> None:
        if not left.is_set():
            finish()
            reached.set()
            left.wait(_HELD)

    later(hold)
    reached.wait(_HELD)
    try:
        yield
    finally:
        left.set()


@dataclass(slots=True)
class _LoadedModel:
    """A loaded model that waits for its arena."""

    load: int
    name: str
    settings: ModelOrder
    model: ServedModel


class _Built(NamedTuple):
    """A module that was loaded for a model."""

    model: int
    name: str
    settings: ModelOrder
    module: weakref.ref[torch.nn.Module]


def _changes_weights(settings: ModelOrder) -> str:
    """Return the setting that changes the weights of the module that a factory returns; empty if none does."""
    changing = ("publish", "weights", "dtype", "channels_last", "group")
    return next((name for name in changing if getattr(settings, name)), "")


class ModelLoader:
    """Loads models in a thread beside the engine's loop.

    The supervisor numbers every load. A model that is unloaded, or loaded again under a new number, while it is still
    being loaded is dropped at the next step: it is neither installed nor reported.

    Args:
        device: the device of the modules.
        tell: sends a message to the supervisor; thread-safe.
        later: runs an action in the loop's thread between two turns.
        engine: the core that the models are installed in.
        report: logs an event, called with (event, fields).
        detail: the same for details of developers.
        factories: the factories that the configuration names; None: any. See `model_code.load`.
        beat: shows that the engine is alive; called in the loop's thread within long turns.
    """

    def __init__(
        self,
        device: torch.device,
        tell: Callable[..., None],
        later: Callable[[Callable[[], None]], None],
        engine: Engine,
        report: Callable[..., None] = lambda event, **fields: None,
        detail: Callable[..., None] = lambda event, **fields: None,
        factories: Collection[str] | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._report, self._detail, self._beat = report, detail, beat
        self._factories = factories
        self._device = device
        self._tell = tell
        self._later = later
        self._engine = engine
        self._groups = Groups(engine, device, later, report)
        self._unplaced: dict[int, _LoadedModel] = {}
        self._built: list[_Built] = []
        self._wanted: dict[int, int] = {}  # model -> its current load; only the loop's thread writes it
        # The models in service; only the loop's thread uses it.
        self._attached: dict[int, tuple[Arena, WeightsChannel | None]] = {}
        self.regions: DeviceRegions | None = None  # the rows that clients have bound to device memory
        self._jobs: queue.SimpleQueue[tuple[int, int, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="model-loader", daemon=True).start()

    def load(self, model: int, load: int, name: str, settings: dict[str, Any]) -> None:
        """Begin to load a model. The load ends with a message "loaded" or "failed"."""
        self._wanted[model] = load
        self._jobs.put((model, load, lambda: self._load(model, load, name, ModelOrder.of(settings))))

    def arena(self, model: int, load: int, segment: str, number: int, rows: int, weights: str) -> None:
        """Continue a load with the model's arena, and with its weights channel if it accepts publications.

        It ends with a message "ready" or "failed".
        """
        self._jobs.put((model, load, lambda: self._finish(model, load, segment, number, rows, weights)))

    def abandon(self, model: int, load: int, reason: str) -> None:
        """Drop a loaded model, since the supervisor could not create its arena or weights channel.

        It ends with a message "failed".
        """
        self._jobs.put((model, load, lambda: self._abandon(model, load, reason)))

    def sleep(self, model: int, load: int, message: str) -> None:
        """Suspend a model and move its weights to host memory in the loader's thread. Call it in the loop's thread.

        It ends with a message "asleep". If the message has a reason, the move failed and the model is served again.
        """
        modules = [module for built in self._built if built.model == model and (module := built.module()) is not None]
        shares = [built.name for module in modules for built in self._sharing(module) if built.model != model]
        if shares:
            reason = f"it has weights in common with model {shares[0]!r}, which would lose them"
            self._turned("asleep", model, load, reason=reason)
            return
        slot = self._engine.rest(model, message) if self._wanted.get(model) == load else None
        if slot is None or not isinstance(served := slot.served, Served):
            self._turned("asleep", model, load, reason="this engine does not serve it, or serves it in a group")
            return

        def move() -> None:
            try:
                moved = served.sleep()
            except BaseException as error:  # noqa: BLE001  some tensors may be on the host: move all of them back
                self._report("sleep failed", model=model, error=said(error), exception=traced(error))
                try:
                    served.wake()
                except BaseException as again:  # noqa: BLE001  then it is asleep, and could not be woken
                    self._turned("awake", model, load, reason=f"{said(error)}; then {said(again)}")
                    return
                self._later(lambda: self._engine.resume(model))
                self._turned("asleep", model, load, reason=said(error))
            else:
                self._turned("asleep", model, load, moved)

        self._jobs.put((model, load, move))

    def wake(self, model: int, load: int) -> None:
        """Move a model's weights back to the device in the loader's thread, then serve it again.

        Call it in the loop's thread. It ends with a message "awake". If the message has a reason, the move failed and
        the model stays asleep.
        """
        slot = self._engine.resting(model) if self._wanted.get(model) == load else None
        if slot is None or not isinstance(served := slot.served, Served):
            self._turned("awake", model, load, reason="it is not asleep in this engine")
            return

        def move() -> None:
            try:
                moved = served.wake()
            except BaseException as error:  # noqa: BLE001  some tensors may be on the device: move all back to the host
                self._report("wake failed", model=model, error=said(error), exception=traced(error))
                reason = said(error)
                try:
                    served.sleep()
                except BaseException as again:  # noqa: BLE001  it is suspended in any case
                    reason = f"{reason}; then {said(again)}"
                self._turned("awake", model, load, reason=reason)
                return

            def resume() -> None:
                if self._wanted.get(model) == load:
                    self._engine.resume(model)
                    self._turned("awake", model, load, moved)

            self._later(resume)

        self._jobs.put((model, load, move))

    def _turned(self, kind: str, model: int, load: int, moved: int = 0, reason: str = "") -> None:
        self._tell(kind, model=model, load=load, bytes=moved, reason=reason)

    def unload(self, model: int) -> None:
        """Drop a model at any stage of its load, or in service. Call it in the loop's thread."""
        self._wanted.pop(model, None)
        for attached in self._attached.pop(model, ()):
            if attached is not None:
                attached.close()
        self._jobs.put((model, 0, lambda: self._left(model)))

    def _work(self) -> None:
        use_device(self._device)
        while True:
            model, load, job = self._jobs.get()
            with contextlib.suppress(OSError):  # the supervisor is gone, and this process will end
                try:
                    if load and self._wanted.get(model) == load:
                        # If the load crashes this process, the supervisor knows which model it was.
                        self._tell("begins", model=model, load=load)
                        job()
                        self._tell("ends")
                    elif not load:
                        job()
                except BaseException as error:  # noqa: BLE001  whatever it raises, only this model has failed
                    if (lost := device_error(self._device)) is not None:
                        self._end_loop(model, error, lost)
                        return
                    self._failed(model, load, error)
                    self._tell("ends")

    def _end_loop(self, model: int, error: BaseException, lost: Exception) -> None:
        """Raise DeviceLost in the loop. Without "ends", the supervisor charges the engine's death to this model."""

        def end() -> None:
            raise DeviceLost(f"{self._device} fails every call since a model was loaded: {said(error)}", model + 1)

        self._report("load failed", model=model, error=said(error), exception=traced(error), device=said(lost))
        self._later(end)

    def _load(self, model: int, load: int, name: str, order: ModelOrder) -> None:
        loaded = load_model(
            name,
            order,
            self._device,
            self._factories,
            lambda names: self._changed(name, names),
            partial(self._refuse_shared, model, name, order),
        )
        spec = loaded.model.spec(name)
        if self._wanted.get(model) != load:
            return
        self._unplaced[model] = _LoadedModel(load, name, order, loaded.model)
        self._tell(
            "loaded",
            model=model,
            load=load,
            inputs=plain_specs(spec.inputs),
            outputs=plain_specs(spec.outputs),
            state=plain_specs(spec.state),
            digest=loaded.digest,
            weights=json.loads(loaded.layout.to_json()) if loaded.layout else [],
        )

    def _finish(self, model: int, load: int, segment: str, number: int, rows: int, weights: str) -> None:
        unplaced = self._unplaced.pop(model, None)
        if unplaced is None or unplaced.load != load:
            raise LoadError("an arena arrived for a model that is not loaded: load it again")
        settings = unplaced.settings
        with contextlib.ExitStack() as undo:
            spec = unplaced.model.spec(unplaced.name)
            arena = Arena.attach(segment, ArenaLayout(spec, rows))
            undo.callback(arena.close)
            compute = getattr(torch, settings.dtype) if settings.dtype else None
            served = self._served(unplaced, arena, compute)
            undo.callback(served.close)
            began = time.monotonic()
            if isinstance(unplaced.model.module, Compiled):
                if any(tensor.variable for tensor in spec.inputs.values()):
                    raise LoadError(
                        f"models.{unplaced.name}.compile: inputs of variable size have too many shapes to compile, "
                        "expected rows of fixed shape"
                    )
                if not served.shapes:
                    served.shapes, served.agreeing = tuple(ladder(settings.max_batch)), False
            if settings.cache_mib:
                if spec.state:
                    raise LoadError(
                        f"models.{unplaced.name}.cache_mib is for models without state: an answer of {unplaced.name!r} "
                        "depends on the requests before it"
                    )
                served.cache = ResponseCache(served, arena.columns, settings.cache_mib << 20)
            served.published = bool(weights)
            served.forward_timeout = settings.forward_timeout or 0.0
            served.changed = lambda names: self._changed(unplaced.name, names)
            with kept(served.changed):
                _warm_up(served, unplaced.model.example)
            if isinstance(unplaced.model.module, Compiled):
                unplaced.model.module.seal()
            warmed = {
                "seconds": time.monotonic() - began,
                "shapes": list(served.shapes),
                "graphs": getattr(unplaced.model.module, "graphs", 0),
            }
            channel = WeightsChannel.attach(weights) if weights else None
            if channel is not None:
                undo.callback(channel.close)
            counters = self._engine.counters(model)
            if settings.group:
                member = Member(model, served, arena.inputs, arena.outputs, channel, counters, number)
                self._groups.join(
                    settings.group,
                    member,
                    compute,
                    lambda: self._ready(model, load, arena, channel, warmed),
                    unplaced.model.example,
                )
                undo.pop_all()
                return
            if channel is not None:
                module = bare(unplaced.model.module)
                if views := views_of_weights(module):
                    self._report("weights are copied in place", model=unplaced.name, views=", ".join(views[:5]))
                overlaps = served if isinstance(served, DeviceServed) else None
                served.weights_updater = WeightsUpdater(
                    channel,
                    module,
                    self._device,
                    settings.keep_versions,
                    self._later,
                    counters.adopted,
                    overlaps.forwards if overlaps else None,
                    self._report,
                    overlaps.after_outputs if overlaps else None,
                    in_place=bool(views),
                )
                served.weights_updater.start()
            clean = undo.pop_all()

        def install() -> None:
            if self._wanted.get(model) != load:
                clean.close()
                return
            try:
                self._engine.install(model, served, settings.min_batch, settings.max_wait_us * 1000, number)
            except DeviceLost:
                raise
            except BaseException as error:  # noqa: BLE001  it runs in the loop, which must not end
                clean.close()
                self._failed(model, load, error)
                return
            self._ready(model, load, arena, channel, warmed)
            self._jobs.put((model, 0, lambda: self._groups.leave(model)))

        self._later(install)

    def _served(self, unplaced: _LoadedModel, arena: Arena, compute: torch.dtype | None) -> Served:
        name, model, settings = unplaced.name, unplaced.model, unplaced.settings
        spec, columns = arena.layout.spec, arena.columns
        shapes = ladder(settings.max_batch) if settings.deterministic else ()
        if spec.open:
            if settings.group:
                raise LoadError(f"model {name!r} has rows that differ in size, or state: it cannot be in a group")
            lanes = self._engine.scoreboard.lanes
            served = OpenServed(name, model, columns, settings.max_batch, self._device, compute, lanes, shapes)
            served.beat = self._beat
            return served
        # A group stacks its members' batches itself, so its members need no DeviceServed.
        plain_host = self._device.type == "cpu" and FAKE not in os.environ
        if plain_host or settings.group or shapes:
            return Served(
                name, model, arena.inputs, arena.outputs, settings.max_batch, self._device, compute, columns, shapes
            )
        return DeviceServed(
            name,
            model,
            arena.inputs,
            arena.outputs,
            arena.segment.array(np.uint8, (arena.segment.size,)),
            settings.max_batch,
            self._device,
            compute,
            graphs=settings.cuda_graphs,
            columns=columns,
            report=self._report,
            regions=self.regions,
            alone=lambda: held(self._later, self._engine.finish),
        )

    def _sharing(self, module: torch.nn.Module) -> list[_Built]:
        """Return the models that have memory of a module's weights in theirs, its own among them."""
        self._built = [built for built in self._built if built.module() is not None]
        mine = storages(module)
        sharing = []
        for built in self._built:
            theirs = built.module()
            if theirs is not None and built.model in self._wanted and not mine.isdisjoint(storages(theirs)):
                sharing.append(built)
        return sharing

    def _refuse_shared(self, model: int, name: str, settings: ModelOrder, module: torch.nn.Module) -> None:
        """Refuse a module that has weights in common with one in service, if a setting changes those of either.

        Raises:
            LoadError: publications to one of the models, or the setting, would change the other's answers.
        """
        for built in self._sharing(module):
            which, setting = built.name, _changes_weights(built.settings)
            if mine := _changes_weights(settings):
                which, setting = name, mine
            if setting:
                raise LoadError(
                    f"models.{name}: its factory returned weights that model {built.name!r} already has, and "
                    f"models.{which}.{setting} changes them for both: build a new module in every call, or return "
                    "copy.deepcopy(module)"
                )
        self._built.append(_Built(model, name, settings, weakref.ref(module)))

    def _changed(self, name: str, names: list[str]) -> None:
        self._report("a model changed what others compute in, it was set back", model=name, changed=", ".join(names))

    def _left(self, model: int) -> None:
        """Drop what is left of an unloaded model, and remove it from its group, before its next load begins."""
        self._unplaced.pop(model, None)
        self._groups.leave(model)

    def _ready(
        self, model: int, load: int, arena: Arena, channel: WeightsChannel | None, warmed: dict[str, Any]
    ) -> None:
        """Report that a model is in service. Runs in the loop's thread."""
        if self._wanted.get(model) != load:  # a group's member, unloaded meanwhile; `_left` removes it from the group
            if model not in self._wanted:
                self._engine.remove(model)
            return
        for earlier in self._attached.pop(model, ()):
            if earlier is not None:
                earlier.close()
        self._attached[model] = (arena, channel)
        self._tell("ready", model=model, load=load, arena=self._engine.arena(model), warm_up=warmed)

    def _abandon(self, model: int, load: int, reason: str) -> None:
        self._unplaced.pop(model, None)
        self._tell("failed", model=model, load=load, reason=reason)

    def _failed(self, model: int, load: int, error: BaseException) -> None:
        place = place_of(error)
        reason = "; ".join([said(error) if isinstance(error, LoadError) else f"{said(error)}{place}", *shadowing()])
        # First, since the supervisor logs the reason. The traceback of a user's code is long and says little more.
        self._tell("failed", model=model, load=load, reason=reason)
        log = self._detail if place or isinstance(error, LoadError) else self._report
        log("load failed", model=model, error=said(error), exception=traced(error))


def _warm_up(served: Served, example: Callable[[int], Mapping[str, Any]] | None) -> None:
    """Compute the first batches. An error of a model that has no example may be due to the made-up rows."""
    try:
        served.warm_up(example)
    except Exception as error:
        texts = [name for name, spec in served.spec.inputs.items() if spec.dtype == BYTES]
        if isinstance(error, Error) or example is not None or not texts:
            raise
        raise LoadError(
            f"{said(error)}: it computed a made-up row, in which {', '.join(texts)} is '0000'; if it can compute only "
            "others, its factory returns some with ServedModel(example=...), see docs/write_a_juror.md"
        ) from error
