"""[server]: where it listens, and its engines."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from jurybox.protocol.address import default_address, is_loopback, local_address
from jurybox.protocol.errors import Refused
from jurybox.protocol.scoreboard import MAX_ENGINES
from jurybox.server.doctor.host import torch_has_cuda, visible_cuda_devices
from jurybox.server.security.access import SecuritySettings
from jurybox.server.settings.endpoints import check_address, split_host
from jurybox.server.settings.values import FactoryPattern, Listen, Seconds, check_absolute


def _check_devices(value: object) -> list[str] | Literal["auto"]:
    """Validate `devices`. A union type would show its branches in error locations."""
    if value == "auto":
        return "auto"
    devices = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(devices, list) or not devices:
        raise ValueError('expected "auto" or a list such as ["cuda:0", "cuda:1"] or ["cpu"]')
    for device in devices:
        if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise ValueError(f'{device!r} is no device, expected "auto", "cpu", or "cuda:0", "cuda:1", ...')
    if len(set(devices)) < len(devices):
        raise ValueError("a device is named twice: for several engines on one device raise 'replicas'")
    return devices


class ServerSettings(SecuritySettings):
    """[server]: one server and its engines. docs/operations.md describes each setting."""

    address: Annotated[str, AfterValidator(check_address)] = Field(default_factory=default_address)
    shared_folder: bool = False
    transport: Literal["auto", "zmq"] = "auto"
    tcp: Listen = ""
    http: Listen = "127.0.0.1:8000"
    grpc: Listen = "127.0.0.1:8001"
    grpc_http2: Literal["auto", "nghttp2", "grpcio"] = "auto"
    replicas: int = Field(default=1, ge=1, le=MAX_ENGINES)
    devices: Annotated[list[str] | Literal["auto"], PlainValidator(_check_devices)] = "auto"
    threads: int = Field(default=0, ge=0, le=1024)
    device_memory_mib: int = Field(default=0, ge=0, le=1 << 30)
    gpu_memory_fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    standby: bool = False
    factories: list[FactoryPattern] = Field(default=[])
    remote_factories: list[FactoryPattern] = Field(default=[])
    exported: list[Annotated[str, AfterValidator(check_absolute)]] = Field(default=[])
    spin_us: int = Field(default=100, ge=0, le=100_000)
    start_timeout: Seconds = 120.0
    drain_timeout: Seconds = 10.0
    engine_timeout: Seconds = 30.0  # half of the default time-out of a request, which so outlives a replaced engine
    sequence_idle: Seconds = 60.0
    sessions_share: float = Field(default=1.0, gt=0.0, le=1.0)
    max_restarts: int = Field(default=5, ge=0, le=1_000_000)
    traces: bool = False
    runs: Annotated[str, AfterValidator(check_absolute)] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="before")
    @classmethod
    def _address_may_be_tcp(cls, given: Any) -> Any:
        """Read ``address = "tcp://host:port"`` as ``tcp = "host:port"``, and add an address for local clients."""
        address = given.get("address") if isinstance(given, dict) else None
        if not isinstance(address, str) or not address.startswith("tcp://"):
            return given
        if given.get("tcp"):
            raise ValueError(
                'address is a tcp:// one and tcp came too, expected tcp = "host:port" and address = "ipc://..."'
            )
        check_address(address)
        tcp = address.removeprefix("tcp://")
        return {**given, "tcp": tcp, "address": local_address(f"tcp-{split_host(tcp)[1]}")}

    @model_validator(mode="after")
    def _fits_together(self) -> ServerSettings:
        engines = self.replicas * (1 if self.devices == "auto" else len(self.devices))
        if engines > MAX_ENGINES:
            raise ValueError(f"replicas x devices makes {engines} engines, expected at most {MAX_ENGINES}")
        if self.http and self.http == self.grpc and split_host(self.http)[1]:
            raise ValueError(f"http and grpc are both {self.http!r}, expected two ports")
        return self

    def engine_devices(self) -> list[str]:
        """Return the device of every engine, each device `replicas` times; "auto" is all CUDA devices, or the CPU.

        Raises:
            Refused: these would be more engines than a server can have.
        """
        devices = self.devices
        if devices == "auto":
            devices = [f"cuda:{n}" for n in range(visible_cuda_devices())] or ["cpu"]
        engines = [device for device in devices for _ in range(self.replicas)]
        if len(engines) > MAX_ENGINES:
            raise Refused(
                f"replicas = {self.replicas} on {len(devices)} devices makes {len(engines)} engines, expected at most "
                f"{MAX_ENGINES}: lower server.replicas, or name fewer server.devices"
            )
        return engines

    def missing_devices(self) -> str:
        """Return the problem with the configured devices; empty if all exist."""
        named = [] if self.devices == "auto" else [device for device in self.devices if device != "cpu"]
        if not named:
            return ""
        expected = 'expected "auto", ["cpu"]'
        if not torch_has_cuda():
            return (
                f"server.devices = {self.devices}: the torch that is installed here has no CUDA, {expected}, or a "
                "torch that is built for CUDA (pytorch.org/get-started)"
            )
        there = [f"cuda:{n}" for n in range(visible_cuda_devices())]
        absent = [device for device in named if (device if ":" in device else "cuda:0") not in there]
        if not absent:
            return ""
        found = f"{', '.join(there)} are there" if there else "no CUDA device is visible"
        return f"server.devices = {self.devices}: {', '.join(absent)} is not here, {found}; {expected} or some of those"

    def engine_threads(self, engines: int = 0) -> int:
        """Return the number of threads that torch may use in each engine.

        By default `engines` engines (0: those of `devices`) share half of the cores.
        """
        cores = len(os.sched_getaffinity(0))
        return self.threads or max(1, cores // 2 // (engines or len(self.engine_devices())))

    def open_transports(self) -> list[str]:
        """Return the transports that are open to other hosts without protection, each with the settings it lacks."""
        found = self.lacking({"server.http": self.http, "server.grpc": self.grpc})
        if self.tcp and not is_loopback(split_host(self.tcp)[0]) and self.curve_clients is None:
            found.append(f'server.tcp = "{self.tcp}" needs server.curve_key and server.curve_clients')
        return found
