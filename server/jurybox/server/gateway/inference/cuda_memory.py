"""The CUDA-shared-memory extension: tensors in device memory that a client exported and registered.

The gateway never touches a device. It binds rows of its own lanes to places in the regions (client/device_rows.py),
and the engines open the regions. So an invalid handle is detected only at the first request that uses it.

A binding belongs to one layout of a request's tensors: clients use the same places repeatedly, and only the first
request of each layout waits for engines to open its regions. The least recently used bindings are evicted.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jurybox.client import Server
from jurybox.client.device_rows import BoundRows
from jurybox.protocol.device_memory import HANDLE
from jurybox.protocol.errors import Code, Error, Refused, Timeout
from jurybox.protocol.spec import ModelSpec
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.inference.parameters import Place
from jurybox.server.gateway.inference.shared_memory import Registered, Registry
from jurybox.server.gateway.inference.tensors import checked_shape, malformed

_MOST_BINDINGS = 64  # each holds rows of an arena
_UNBIND = 30.0  # seconds that engines have to close the memory


@dataclass(frozen=True, slots=True)
class CudaRegion(Registered):
    """A registered region of device memory."""

    handle: bytes
    device: int


@dataclass(slots=True)
class _Binding:
    """A binding, and the lock that orders its requests."""

    rows: BoundRows
    regions: frozenset[str]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class CudaRegions(Registry[CudaRegion]):
    """The registered regions and the rows bound to them.

    Args:
        allowed: whether regions can be registered.
        frontend: has the gateway's connection.
    """

    def __init__(self, *, allowed: bool, frontend: Frontend) -> None:
        super().__init__("CUDA region")
        self.allowed = allowed
        self._frontend = frontend
        self._bindings: OrderedDict[Any, _Binding] = OrderedDict()
        self._making = asyncio.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._regions

    def register(self, name: str, handle: bytes, device: int, size: int) -> None:
        """Register a region. Raises Refused: registration is off, the name is taken, or the handle is invalid."""
        if not self.allowed:
            raise Refused(
                "CUDA shared memory is off here. To accept it from clients, set server.cuda_shared_memory = true, on a "
                "server whose HTTP and gRPC listen on loopback alone"
            )
        self._require_free(name)
        if len(handle) != HANDLE or size < 1 or device < 0:
            raise Refused(
                f"region {name!r}: expected a handle of {HANDLE} bytes and a size, {len(handle)} and {size} came",
                Code.MALFORMED,
            )
        self._require_room()
        self._regions[name] = CudaRegion(name, size, handle, device)

    async def unregister(self, name: str = "") -> None:
        """Unregister a region once no engine has it open; without a name, all. An unknown name is ignored.

        Raises:
            Timeout: an engine has used it in a batch for too long; the region stays registered.
        """
        for region in self._chosen(name):
            async with self._making:
                for key, binding in list(self._bindings.items()):
                    if region in binding.regions:
                        await self._end(key, binding)
            self._regions.pop(region, None)

    async def infer(
        self,
        spec: ModelSpec,
        inputs: Mapping[str, tuple[str, Sequence[Any], Place]],
        outputs: Mapping[str, Place],
        until: float,
        version: int,
    ) -> tuple[int, int]:
        """Answer a request whose tensors all lie in regions; return the number of rows and the weights version.

        Args:
            inputs: the datatype, shape and place of each input.
            outputs: the place of each requested output.
            until: the deadline, of `time.monotonic`.

        Raises:
            Timeout, and the errors of the inputs' check, of the binding and of `Rows.infer`.
        """
        rows = self._checked(spec, inputs)
        for name, place in outputs.items():
            self.check(place, rows * spec.outputs[name].row_bytes, name)
        places = tuple((name, place) for name, (_, _, place) in sorted(inputs.items()))
        key = spec.name, rows, places, tuple(sorted(outputs.items(), key=lambda item: item[0]))
        seconds = max(0.0, until - time.monotonic())
        try:
            async with asyncio.timeout(seconds):
                binding = await self._binding(key, spec.name, rows, dict(places), outputs, until)
                async with binding.turn:
                    if self._bindings.get(key) is not binding:
                        raise Refused("a region of this request was unregistered meanwhile", Code.BUSY)
                    try:
                        left = max(0.0, until - time.monotonic())
                        await asyncio.to_thread(binding.rows.infer, rows, timeout=left, version=version)
                    except Error as error:
                        if error.code in (Code.STALE_LEASE, Code.SERVER_GONE):
                            self._bindings.pop(key, None)
                        raise
                    return rows, binding.rows.version
        except Timeout:
            raise
        except TimeoutError as error:
            raise Timeout(
                f"model {spec.name!r} did not answer within {seconds:g} s with tensors in CUDA regions: send a longer "
                "timeout, or fewer rows"
            ) from error

    async def _binding(
        self, key: Any, model: str, rows: int, inputs: dict[str, Place], outputs: Mapping[str, Place], until: float
    ) -> _Binding:
        async with self._making:
            if (binding := self._bindings.get(key)) is None:
                while len(self._bindings) >= _MOST_BINDINGS:
                    oldest = next(iter(self._bindings))
                    await self._end(oldest, self._bindings[oldest])
                make = functools.partial(self._bound, model, rows, inputs, outputs, until)
                regions = frozenset(place.region for place in (*inputs.values(), *outputs.values()))
                binding = self._bindings[key] = _Binding(await self._frontend.call(make), regions)
            self._bindings.move_to_end(key)
            return binding

    def _bound(
        self,
        model: str,
        rows: int,
        inputs: dict[str, Place],
        outputs: Mapping[str, Place],
        until: float,
        server: Server,
    ) -> BoundRows:
        def where(places: Mapping[str, Place]) -> dict[str, tuple[bytes, int]]:
            return {name: (self._named(place.region).handle, place.offset) for name, place in places.items()}

        left = max(0.0, until - time.monotonic())
        return server.bound_rows(model, rows, where(inputs), where(outputs), timeout=left)

    async def _end(self, key: Any, binding: _Binding) -> None:
        """End a binding once its current request is answered."""
        async with binding.turn:
            self._bindings.pop(key, None)
            await asyncio.to_thread(binding.rows.end, _UNBIND)

    def _checked(self, spec: ModelSpec, inputs: Mapping[str, tuple[str, Sequence[Any], Place]]) -> int:
        """Check the inputs against the spec and return their number of rows."""
        if inputs.keys() != spec.inputs.keys():
            raise malformed(f"inputs {', '.join(inputs) or 'none'} came, expected {', '.join(spec.inputs)}")
        counts = set()
        for name, (datatype, shape, place) in inputs.items():
            tensor = spec.inputs[name]
            rows = checked_shape(name, datatype, shape, tensor)[0]
            counts.add(rows)
            self.check(place, rows * tensor.row_bytes, name)
        if len(counts) != 1:
            raise malformed(f"inputs have {sorted(counts)} rows, expected the same number in each")
        return counts.pop()
