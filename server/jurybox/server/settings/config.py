"""The server's configuration: all settings with defaults and bounds, and how they are loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jurybox.protocol.address import default_address, is_loopback, local_address
from jurybox.protocol.errors import Refused, did_you_mean
from jurybox.protocol.parameters import MOST_PARAMETERS, RESERVED, Parameter
from jurybox.protocol.scoreboard import FIRST, LAST, MAX_ENGINES, MAX_MODELS, NORMAL
from jurybox.protocol.spec import OIP_NAMES, TensorSpec
from jurybox.protocol.wire import MAX_NAME
from jurybox.server.doctor.host import torch_has_cuda, visible_cuda_devices
from jurybox.server.security.access import FILES as _SECURITY_FILES
from jurybox.server.security.access import SecuritySettings, too_open
from jurybox.server.settings.dialect_fields import FIELDS, PICKLED
from jurybox.server.settings.endpoints import check_address, check_host_port, check_listen, split_host
from jurybox.server.settings.robot_protocols import MODALITIES, MODALITY_FIELDS, WITHOUT_TLS, WITHOUT_TOKEN
from jurybox.server.settings.sources import InvalidConfig, Sources, parse_flags, problems

__all__ = [
    "Configuration",
    "InvalidConfig",
    "ModelSettings",
    "ServerSettings",
    "load_settings",
    "model_settings_from_json",
]

_AUTO_ARENA_BYTES, _AUTO_ROWS = 128 << 20, 4096
_AUTO_CLIENTS, _AUTO_LANE_ROWS = 128, 64
_FILES = ("exported", "weights")  # settings of a model that name files
_PATHS = (*_FILES, "save_dir", "python")  # settings of a model that are paths, existing or not

_EXAMPLE = """\
[models.photo]
factory = "jurybox.server.jurors:panel"\
"""


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


def _text(pattern: str, expected: str, most: int = 1 << 20) -> AfterValidator:
    """Return a validator of text that matches `pattern` and has at most `most` characters.

    The error text is `expected`.
    """

    def check(text: str) -> str:
        if len(text) > most or not re.fullmatch(pattern, text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


def _check_dtype(text: str) -> str:
    if text not in OIP_NAMES:
        raise ValueError(f"expected one of {', '.join(OIP_NAMES)}")
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _check_absolute(text: str) -> str:
    if not Path(text).is_absolute():
        raise ValueError("expected an absolute path of a file or of a folder")
    return text


# The factories that come with Jurybox. Not all of its modules are allowed, since some of them start processes.
_OWN_FACTORIES = (
    "jurybox.server.jurors:*",
    "jurybox.training.algorithms.served_networks:*",
    "jurybox.studies.photo.network:*",
)
# The settings that a client on another host may give for its model: none that reads from disk or writes to it.
_FROM_ELSEWHERE = frozenset(
    {
        *("factory", "args", "max_batch", "min_batch", "max_wait_us", "rows", "lane_rows", "group"),
        *("publish", "keep_versions", "max_lag", "dtype", "channels_last", "cuda_graphs", "deterministic", "audit"),
        "parameters",
    }
)
LONGEST_KEEP = 3600.0  # seconds that a model may be kept without a request of the client that loaded it

Seconds = Annotated[float, Field(gt=0, le=86400)]
Listen = Annotated[str, AfterValidator(check_listen)]
_NAMED = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
Factory = Annotated[str, _text(_NAMED, '"module:callable" such as "jurybox.server.jurors:panel"')]
FactoryPattern = Annotated[
    str, _text(rf"{_NAMED}|[A-Za-z_][\w.]*:\*", '"module:callable", or "module:*" for all that the module defines')
]
ParameterName = Annotated[
    str,
    _text(
        rf"(?!(?:{'|'.join(sorted(RESERVED))})$)[A-Za-z_][\w.-]{{0,63}}",
        f"a name of letters, digits, '_', '.' and '-' that is none of {', '.join(sorted(RESERVED))}",
    ),
]
ModelName = Annotated[
    str,
    _text(
        r"(?a)(?!.+/versions/[^/]+$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*",
        f'a name of letters, digits and "_.-", in parts divided by "/", at most {MAX_NAME} in all, and not one that '
        'ends in "/versions/..." (over HTTP that names a version of another model)',
        MAX_NAME,
    ),
]
DialectName = Annotated[str, _text(r"(?a)[A-Za-z0-9][\w.-]{0,99}", 'a name of letters, digits and "_.-"')]


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
    exported: list[Annotated[str, AfterValidator(_check_absolute)]] = Field(default=[])
    spin_us: int = Field(default=100, ge=0, le=100_000)
    start_timeout: Seconds = 120.0
    drain_timeout: Seconds = 10.0
    engine_timeout: Seconds = 30.0  # half of the default time-out of a request, which so outlives a replaced engine
    sequence_idle: Seconds = 60.0
    sessions_share: float = Field(default=1.0, gt=0.0, le=1.0)
    max_restarts: int = Field(default=5, ge=0, le=1_000_000)
    traces: bool = False
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


class TensorSettings(_Strict):
    """One tensor of an exported model: dtype, and the shape of ONE row."""

    dtype: Annotated[str, AfterValidator(_check_dtype)]
    shape: list[Annotated[int, Field(ge=-1)]] = []
    capacity: int = Field(default=0, ge=0)
    finite: bool = False

    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, tuple(self.shape), self.capacity, self.finite)

    @model_validator(mode="after")
    def _is_a_spec(self) -> TensorSettings:
        self.spec()
        return self


class ParameterSettings(_Strict):
    """A parameter of requests that is an input of the model: its value if none comes, and the input's name."""

    default: bool | int | float | str
    input: Annotated[str, Field(min_length=1, max_length=200)] | None = None


@dataclass(slots=True)
class _Holders:
    """The server's own users of a model that keep a lane of it: dialects, directly or through a panel, and robots."""

    dialects: list[str] = field(default_factory=list)
    robots: dict[str, int] = field(default_factory=dict)  # maximum number of clients, by name

    def needed(self, rows: int, model: ModelSettings, *, state: bool = False) -> int:
        """Return the rows of all their lanes and the gateway's, for an arena of `rows` rows; 0 without any.

        Args:
            state: whether the model keeps state. Then each client of a robots' port needs its own row.
        """
        half = max(1, rows // 2)
        lanes = len(self.dialects) * model.lane_rows_of(rows)
        lanes += sum(clients if state else min(clients, half) for clients in self.robots.values())
        return lanes + (half if state else min(2 * model.max_batch, half)) if lanes else 0

    def enough(self, rows: int, model: ModelSettings, *, state: bool = False) -> int:
        """Return the smallest number of rows, at least `rows`, that suffices for all lanes."""
        while (needed := self.needed(rows, model, state=state)) > rows:
            rows = needed
        return rows

    def problem(self, name: str, model: ModelSettings) -> str:
        """Return why the `rows` that a model's settings name are too few for all lanes; empty if they are not."""
        if not model.rows or (enough := self.enough(model.rows, model)) == model.rows:
            return ""
        users = [f"dialects.{one}" for one in self.dialects] + [f"robots.{one}" for one in self.robots]
        return (
            f"models.{name}.rows = {model.rows}, expected at least {enough}: {', '.join(users)} keep a lane of it each "
            f"({model.lane_rows_of(model.rows)} rows, a robot's as many as it has clients), and the gateway one for "
            f"its other callers (two batches of {model.max_batch}, or half of the rows)"
        )


class ModelSettings(_Strict):
    """[models.NAME]: the source of a model and its batching. docs/operations.md describes each setting."""

    factory: Factory | None = None
    exported: str | None = None
    args: dict[str, JsonValue] = {}
    weights: str | None = None
    python: Annotated[str, AfterValidator(_check_absolute)] | None = None
    gpu_memory_fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    max_batch: int = Field(default=64, ge=1, le=65536)
    min_batch: int = Field(default=1, ge=1, le=65536)
    max_wait_us: int = Field(default=0, ge=0, le=1_000_000)
    forward_timeout: float | None = Field(default=None, gt=0.0, le=86_400.0)
    rows: int = Field(default=0, ge=0, le=1 << 24)
    lane_rows: int = Field(default=0, ge=0, le=1 << 24)
    group: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    publish: Literal["double_buffer", "snapshot"] | None = None
    keep_versions: int = Field(default=0, ge=0, le=1000)
    max_lag: int = Field(default=0, ge=0, le=1_000_000)
    save_dir: Annotated[str, Field(min_length=1)] | None = None
    save_every: int = Field(default=1, ge=1, le=1_000_000_000)
    save_keep: int = Field(default=3, ge=1, le=100_000)
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    channels_last: bool = False
    compile: bool = False
    export: bool = False
    aot: bool = False
    cuda_graphs: bool = True
    deterministic: bool = False
    cache_mib: int = Field(default=0, ge=0, le=1 << 20)
    audit: bool = False
    parameters: dict[ParameterName, ParameterSettings] = Field(default={}, max_length=MOST_PARAMETERS)
    inputs: dict[str, TensorSettings] | None = None
    outputs: dict[str, TensorSettings] | None = None
    _holders: _Holders = PrivateAttr(default_factory=_Holders)

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSettings:
        if (self.factory is None) == (self.exported is None):
            both = "both came" if self.factory else "neither came"
            raise ValueError(f'expected either factory = "module:callable" or exported = "file.pt2", {both}')
        if self.exported is not None and self.args:
            raise ValueError("args are the arguments of a factory, an exported model takes none")
        if self.factory is not None and (self.inputs or self.outputs):
            raise ValueError("inputs and outputs are for exported models, a factory says its own")
        if self.export and (self.exported is not None or self.compile):
            what = "an exported program needs no export" if self.exported else "compile exports the module, too"
            raise ValueError(f"{what}: expected only one of exported, export and compile")
        if self.aot:
            self._require_fit_for_package()
        if self.min_batch > self.max_batch:
            raise ValueError(f"min_batch = {self.min_batch}, expected at most max_batch = {self.max_batch}")
        if self.min_batch > 1 and self.max_wait_us == 0:
            raise ValueError(f"min_batch = {self.min_batch} is never waited for, expected max_wait_us above 0 with it")
        if self.cache_mib and not self.deterministic:
            raise ValueError(
                "cache_mib is for models whose answer depends only on the row and the weights, expected deterministic "
                "= true with it"
            )
        if self.group is not None and (alone := self._only_alone()):
            raise ValueError(f"{alone} is for models that are served by themselves, expected none with group")
        if self.publish is None and (self.save_dir is not None or self.max_lag):
            setting = "save_dir" if self.save_dir is not None else "max_lag"
            raise ValueError(f"{setting} is for models that take publications, expected publish with it")
        if self.gpu_memory_fraction is not None and self.python is None:
            raise ValueError(
                "gpu_memory_fraction of a model is for an engine of its own, expected python with it, or "
                "server.gpu_memory_fraction"
            )
        if self.rows and self.lane_rows > self.rows:
            raise ValueError(f"lane_rows = {self.lane_rows}, expected at most rows = {self.rows}")
        return self

    def _require_fit_for_package(self) -> None:
        """Refuse settings that do not fit an AOTInductor package, which is compiled and has no shapes and names."""
        if self.exported is None or not self.inputs or not self.outputs:
            raise ValueError("aot is for exported = a package of AOTInductor, expected inputs and outputs with it")
        if self.compile or self.dtype or self.channels_last:
            raise ValueError("a package is already compiled, expected no compile, dtype, channels_last with aot")
        if self.publish is not None and self.weights is None:
            raise ValueError("a package does not describe its weights, expected weights with aot and publish")

    def _only_alone(self) -> str:
        """Return the name of a setting that cannot be combined with a group; empty if there is none."""
        given = {
            "exported": self.exported is not None,
            "compile": self.compile,
            "export": self.export,
            "keep_versions": self.keep_versions > 0,
            "deterministic": self.deterministic,
            "min_batch": self.min_batch > 1,
        }
        return next((name for name, there in given.items() if there), "")

    def own_parameters(self) -> dict[str, Parameter]:
        """Return the parameters, with the names of their inputs."""
        return {name: Parameter(one.input or name, one.default) for name, one in self.parameters.items()}

    def resolve_rows(self, row_bytes: int, *, state: bool = False) -> int:
        """Return the number of rows of the arena.

        Args:
            row_bytes: bytes of a row (ModelSpec.row_bytes).
            state: whether the model keeps state.
        """
        fitting = min(_AUTO_ARENA_BYTES // row_bytes, _AUTO_ROWS)
        return self.rows or self._holders.enough(max(fitting, 2 * self.max_batch, self.lane_rows), self, state=state)

    def resolve_lane_rows(self, row_bytes: int, *, state: bool = False) -> int:
        """Return the default number of rows of a lane: small enough for more than a hundred clients."""
        return self.lane_rows_of(self.resolve_rows(row_bytes, state=state))

    def lane_rows_of(self, rows: int) -> int:
        """As `resolve_lane_rows`, for an arena of `rows` rows."""
        return self.lane_rows or max(1, min(rows // _AUTO_CLIENTS, _AUTO_LANE_ROWS))


class EngineSettings(NamedTuple):
    """An engine of a server.

    Attributes:
        device: the device it computes on.
        python: the interpreter that runs it; empty: the server's own.
        memory: the fraction of the device's memory that it may use.
    """

    device: str
    python: str
    memory: float


class RobotSettings(_Strict):
    """[robots.NAME]: a port for robots, bound to a model. docs/operations.md describes each setting."""

    model: str
    speaks: Literal["openpi", "act", "gr00t", "lerobot"] = "openpi"
    listen: Annotated[str, AfterValidator(check_host_port)]
    clients: int = Field(default=64, ge=1, le=1024)
    timeout: Seconds = 60.0
    priority: Annotated[int, Field(ge=FIRST, le=LAST)] = NORMAL
    ping: Seconds = 20.0
    metadata: dict[str, JsonValue] = {}
    unprotected: bool = False
    like: Literal["n1.5", "n1.6"] = "n1.6"
    fps: float = Field(default=30.0, gt=0, le=10_000)

    @model_validator(mode="after")
    def _fits_together(self) -> RobotSettings:
        if self.speaks == "gr00t":
            for kind, fields in self.metadata.items():
                if kind not in MODALITIES or not isinstance(fields, dict) or not fields.keys() <= set(MODALITY_FIELDS):
                    raise ValueError(
                        f"metadata.{kind}: expected tables {', '.join(MODALITIES)} with {', '.join(MODALITY_FIELDS)}"
                    )
        return self


def _numbered(models: Any) -> Any:
    """Expand [models."NAME*"] with count = N to N models, the star replaced by 0 to N - 1."""
    if not isinstance(models, dict):
        return models
    result = {}
    for name, settings in models.items():
        count = settings.get("count") if isinstance(settings, dict) else None
        if ("*" in name) != (count is not None) or name.count("*") > 1:
            raise ValueError(f"expected count with a star in the name and the other way round, got {name!r}")
        if count is None:
            result[name] = settings
            continue
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_MODELS:
            raise ValueError(f"count = {count!r} of {name!r}, expected 1 to {MAX_MODELS}")
        one = {key: value for key, value in settings.items() if key != "count"}
        several = {name.replace("*", str(number)): dict(one) for number in range(count)}
        if twice := sorted(several.keys() & (models.keys() | result.keys())):
            raise ValueError(f"{twice[0]!r} is named twice, by itself and by {name!r}")
        result |= several
    return result


class DialectSettings(_Strict):
    """[dialects.NAME]: a protocol of another project at /dialects/NAME, bound to a model; docs/dialects.md."""

    model: ModelName
    speaks: str | None = None
    inputs: dict[str, str] = {}
    output: str | None = None
    reward: str | None = None
    resize: list[Annotated[int, Field(ge=1, le=8192)]] = Field(default=[], max_length=2)
    timeout: Seconds = 100.0
    priority: Annotated[int, Field(ge=FIRST, le=LAST)] = NORMAL
    port: int | None = Field(default=None, ge=0, le=65535)
    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
    pickles_from_elsewhere: bool = False
    like: Literal["vllm", "sglang", "lmdeploy"] = "vllm"
    score_range: list[float] = Field(default=[], max_length=2)
    decimals: Annotated[int, Field(ge=0, le=9)] = 6

    @property
    def listen(self) -> str:
        """ "host:port" of its own port; empty if it has none."""
        if self.port is None:
            return ""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @model_validator(mode="after")
    def _fits_together(self) -> DialectSettings:
        check_listen(self.listen)
        if len(self.resize) == 1:
            raise ValueError(f"resize = {self.resize}, expected [height, width]")
        if self.score_range and not (len(self.score_range) == 2 and self.score_range[0] < self.score_range[1]):
            raise ValueError(f"score_range = {self.score_range}, expected [lowest, highest]")
        return self


# Settings that only some dialects use. To others they would promise what nothing does.
_ONLY_OF = {
    **dict.fromkeys(("like", "decimals"), frozenset({"reward_model"})),
    "score_range": frozenset({"reward_model", "robometer"}),
    "pickles_from_elsewhere": PICKLED,
}


class MemberSettings(_Strict):
    """One member of a panel: the weight of its score, and the model and output that the score comes from."""

    weight: float
    model: ModelName | None = None
    output: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _weight_alone(cls, given: Any) -> Any:
        is_weight = isinstance(given, (int, float)) and not isinstance(given, bool)
        return {"weight": float(given)} if is_weight else given

    def plain(self, name: str) -> dict[str, Any]:
        """Return the member as in the status document."""
        return {"weight": self.weight, "model": self.model or name, "output": self.output}


class PanelSettings(_Strict):
    """[panels.NAME]: a juror whose score is the weighted sum of its members' scores; docs/dialects.md."""

    members: Annotated[dict[ModelName, MemberSettings], Field(min_length=1, max_length=32)]


def _wrong_table(message: str, *key: str) -> PydanticCustomError:
    """Return the error of a check across tables, for a validator to raise; `key` is the table that it names.

    pydantic reports the error of a validator of all settings without a key, so the error carries one.
    """
    return PydanticCustomError("wrong_table", "{message}", {"message": message, "key": key})


class Configuration(_Strict):
    """All settings of a server."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    models: Annotated[dict[ModelName, ModelSettings], BeforeValidator(_numbered)] = Field(
        default_factory=dict, max_length=MAX_MODELS
    )
    dialects: dict[DialectName, DialectSettings] = Field(default_factory=dict, max_length=100)

    panels: dict[ModelName, PanelSettings] = Field(default_factory=dict, max_length=100)

    _folder: str = PrivateAttr(default="")

    @property
    def folder(self) -> str:
        """The folder of the file that these settings come from; empty: there was none."""
        return self._folder

    @model_validator(mode="after")
    def _interpreters_agree(self) -> Configuration:
        """Check that models agree that share an engine: those of one group, and those of one interpreter."""
        groups: dict[str, tuple[str, str | None]] = {}
        for name, model in self.models.items():
            first, python = groups.setdefault(model.group or f" {name}", (name, model.python))
            if python != model.python:
                raise _wrong_table(
                    f"models {first!r} and {name!r} of group {model.group!r} have python = {python!r} and "
                    f"{model.python!r}: one engine computes a group, expected the same",
                    *("models", name),
                )
        for python in self.pythons():
            memory = {m.gpu_memory_fraction for m in self.models.values() if m.python == python} - {None}
            if len(memory) > 1:
                raise ValueError(
                    f"models of python = {python!r} have gpu_memory_fraction = {sorted(memory)}: they share an engine, "  # type: ignore[type-var]
                    "expected one number"
                )
        return self

    def pythons(self) -> list[str]:
        """Return the interpreters that models name."""
        return list(dict.fromkeys(model.python for model in self.models.values() if model.python))

    def engines(self) -> list[EngineSettings]:
        """Return all engines: the server's own, then for every other interpreter one on each device.

        Raises:
            Refused: these would be more engines than a server can have.
        """
        server = self.server
        own = server.engine_devices()
        engines = [EngineSettings(device, "", server.gpu_memory_fraction) for device in own]
        for python in self.pythons():
            given = (m.gpu_memory_fraction for m in self.models.values() if m.python == python)
            memory = next((one for one in given if one is not None), server.gpu_memory_fraction)
            engines += [EngineSettings(device, python, memory) for device in dict.fromkeys(own)]
        if len(engines) > MAX_ENGINES:
            raise Refused(
                f"{len(own)} engines, and those of {len(self.pythons())} other interpreters, make {len(engines)}, "
                f"expected at most {MAX_ENGINES}: name fewer server.devices"
            )
        return engines

    @model_validator(mode="after")
    def _panels_have_members(self) -> Configuration:
        for name, panel in self.panels.items():
            table = ("panels", name)
            if name in self.models:
                raise _wrong_table(f"[panels.{name}]: a model has that name, too", *table)
            if "score" in panel.members:
                raise _wrong_table(
                    f"[panels.{name}] has a member 'score', which is the total's name: expected another", *table
                )
            for member, one in panel.members.items():
                model = one.plain(member)["model"]
                if model not in self.models:
                    raise _wrong_table(
                        f"[panels.{name}] has the member {model!r}, which is no configured model", *table
                    )
        return self

    @model_validator(mode="after")
    def _dialects_can_be_spoken(self) -> Configuration:
        for name, dialect in self.dialects.items():
            speaks = dialect.speaks or name
            at, table = f"[dialects.{name}]", ("dialects", name)
            if speaks not in FIELDS:
                raise _wrong_table(f"{at} speaks {speaks!r}, expected speaks = one of {', '.join(FIELDS)}", *table)
            for setting, speakers in _ONLY_OF.items():
                if setting in dialect.model_fields_set and speaks not in speakers:
                    raise _wrong_table(
                        f"{at} speaks {speaks!r}, which does not use {setting}: only {', '.join(sorted(speakers))} "
                        "does; remove it",
                        *(*table, setting),
                    )
            if dialect.model not in self.models and dialect.model not in self.panels:
                there = did_you_mean(dialect.model, [*self.models, *self.panels])
                raise _wrong_table(f"{at} is bound to model {dialect.model!r}, which is not configured{there}", *table)
            if not self.server.http and not dialect.listen:
                raise _wrong_table(
                    f"{at} is spoken over HTTP, expected server.http with it, or a port of its own", *table
                )
            for setting, where in (("server.http", self.server.http), (f"dialects.{name}.host", dialect.listen)):
                open_to_others = where and not is_loopback(split_host(where)[0])
                if speaks in PICKLED and open_to_others and not dialect.pickles_from_elsewhere:
                    raise _wrong_table(
                        f'{at} takes pickles, and {setting} = "{where}" is open to other hosts: expected a '
                        "loopback host, or pickles_from_elsewhere = true (they are read without being unpickled)",
                        *table,
                    )
        return self

    robots: dict[ModelName, RobotSettings] = Field(default_factory=dict, max_length=MAX_MODELS)

    @model_validator(mode="after")
    def _fits_together(self) -> Configuration:
        for name, robot in self.robots.items():
            if robot.model not in self.models:
                there = ", ".join(sorted(self.models)) or "none"
                raise _wrong_table(
                    f"robots.{name}.model = {robot.model!r} is not configured; there are: {there}", "robots", name
                )
            if robot.speaks in WITHOUT_TOKEN and self.server.guarded and not robot.unprotected:
                raise _wrong_table(
                    f"robots.{name}: clients of {robot.speaks!r} have neither token nor TLS, which server.token_file "
                    "and server.tls_cert require: expected unprotected = true, on a host that only robots reach",
                    "robots",
                    name,
                )
        robots = [robot.listen for robot in self.robots.values()]
        dialects = [dialect.listen for dialect in self.dialects.values()]
        taken = [*robots, *dialects, self.server.http, self.server.grpc, self.server.tcp]
        if twice := sorted({where for where in taken if where and split_host(where)[1] and taken.count(where) > 1}):
            raise ValueError(
                f"{twice[0]!r} is listened on twice, by robots or dialects among others: expected a port for each"
            )
        self._assign_lanes()
        return self

    def _assign_lanes(self) -> None:
        """Record for each model which dialects and robots keep a lane of it.

        Raises:
            ValueError: a model has too few rows for all of these lanes.
        """
        for model in self.models.values():
            model._holders = _Holders()
        for name, dialect in self.dialects.items():
            panel = self.panels.get(dialect.model)
            members = panel.members if panel else {}
            asked = [one.plain(member)["model"] for member, one in members.items()] if panel else [dialect.model]
            for each in asked:
                self.models[each]._holders.dialects.append(name)
        for name, robot in self.robots.items():
            self.models[robot.model]._holders.robots[name] = robot.clients
        for name, model in self.models.items():
            if problem := model._holders.problem(name, model):
                raise _wrong_table(problem, "models", name)

    def open_transports(self) -> list[str]:
        """Return the transports that are open to other hosts without protection, each with the settings it lacks."""
        robots = {f"robots.{name}.listen": robot for name, robot in self.robots.items() if not robot.unprotected}
        plain = {name: robot.listen for name, robot in robots.items() if robot.speaks in WITHOUT_TLS}
        dialects = {f"dialects.{name}.host": dialect.listen for name, dialect in self.dialects.items()}
        secured = {name: robot.listen for name, robot in robots.items() if name not in plain}
        without = [
            f'{name} = "{where}": its clients have no TLS; use a tunnel to loopback, or set unprotected = true'
            for name, where in plain.items()
            if not is_loopback(split_host(where)[0])
        ]
        return [*self.server.open_transports(), *self.server.lacking({**secured, **dialects}), *without]

    def doors(self) -> dict[str, Any]:
        """Return where the server listens, as its "serving" line shows it."""
        dialects = {name: dialect.listen for name, dialect in self.dialects.items() if dialect.listen}
        robots = {name: robot.listen for name, robot in self.robots.items()}
        server = self.server
        return {"http": server.http, "grpc": server.grpc, "tcp": server.tcp, "robots": robots, "dialects": dialects}

    def plain_dialects(self) -> dict[str, dict[str, Any]]:
        """Return the dialects as JSON values for the gateway, with the weights of a panel's members."""
        return {
            name: {
                **dialect.model_dump(mode="json"),
                "members": {name: one.weight for name, one in panel.members.items()} if panel else {},
            }
            for name, dialect in self.dialects.items()
            for panel in [self.panels.get(dialect.model)]
        }

    def plain_panels(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the members of every panel as JSON values: weight, model and output by name."""
        return {
            name: {member: one.plain(member) for member, one in panel.members.items()}
            for name, panel in self.panels.items()
        }


def named_factories(settings: Configuration) -> list[str]:
    """Return the factories that the configuration names explicitly, without patterns."""
    named = [model.factory for model in settings.models.values() if model.factory]
    listed = (*settings.server.factories, *settings.server.remote_factories)
    return [*dict.fromkeys((*named, *(name for name in listed if not name.endswith(":*"))))]


def require_loadable_from_elsewhere(settings: Configuration, name: str, model: ModelSettings, keep: float) -> None:
    """Refuse a model of a client on another host that `server.remote_factories` does not allow.

    Raises:
        Refused: the message says which setting to add.
    """
    if unknown := sorted(model.model_fields_set - _FROM_ELSEWHERE):
        raise Refused(
            f"{unknown[0]} of model {name!r} is not taken from a network: expected some of {sorted(_FROM_ELSEWHERE)}"
        )
    module = str(model.factory).partition(":")[0]
    if not {str(model.factory), f"{module}:*"} & set(settings.server.remote_factories):
        raise Refused(
            f"factory {model.factory!r} of model {name!r} may not be loaded from another host. To allow it, add this "
            f'line to [server] of the server\'s configuration: remote_factories = ["{module}:*"], for all that this '
            f'module defines, or ["{model.factory}"]'
        )
    if not 0 < keep <= LONGEST_KEEP:
        raise Refused(
            f"keep = {keep:g} of model {name!r}: a model from another host is held for 1 to {LONGEST_KEEP:g} s, and "
            "longer while its client asks for it"
        )


def require_loadable(settings: Configuration, name: str, model: ModelSettings) -> None:
    """Refuse code that a client names unless the configuration allows it, since it runs as this user.

    Raises:
        Refused: the message says which setting to add.
    """
    if model.factory is not None:
        own = (*_OWN_FACTORIES, *settings.server.factories, *settings.server.remote_factories)
        allowed = {*named_factories(settings), *own}
        module = model.factory.partition(":")[0]
        if not allowed & {model.factory, f"{module}:*"}:
            raise Refused(
                f"factory {model.factory!r} of model {name!r} is not in the server's configuration, and clients may "
                f'not name other code. To allow it, set server.factories = ["{model.factory}"], or "{module}:*" '
                "for all that this module defines"
            )
    if model.exported is not None:
        file = Path(model.exported).resolve()
        there = [held.exported for held in settings.models.values() if held.exported]
        if not any({Path(entry).resolve()} & {file, *file.parents} for entry in (*there, *settings.server.exported)):
            raise Refused(
                f"exported {str(file)!r} of model {name!r} is not in the server's configuration, and clients may "
                f'not name other programs. To allow it, set server.exported = ["{file.parent}"], for all of that '
                "folder"
            )


def load_settings(
    path: Path | None, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Configuration:
    """Read settings. The command line overrides the environment, that the file, and that the defaults.

    Args:
        path: the TOML file, if there is one.
        sets: ``KEY=VALUE`` of every --set, in order.
        environ: the environment variables; None: those of this process.

    Raises:
        ConfigError: names every wrong setting with its source and what was expected there.
    """
    server_keys, model_keys = list(ServerSettings.model_fields), [*ModelSettings.model_fields, "count"]
    sources = Sources()
    if path is not None:
        sources.add_file(path, _PATHS, _SECURITY_FILES)
    flags, wrong = parse_flags(sets, list(Configuration.model_fields), server_keys, model_keys)
    from_flags = {key[1] for key, _, _ in flags if key[0] == "models"}
    wrong += sources.add_environment(os.environ if environ is None else environ, server_keys, model_keys, from_flags)
    wrong += sources.add_flags(flags)
    try:
        settings = Configuration.model_validate(sources.tree)
    except ValidationError as error:
        raise InvalidConfig("\n".join([*wrong, *problems(error, Configuration, sources.place)])) from error
    wrong += [
        f"{sources.place(('models', name, key))}: models.{name}.{key} = {file!r}: there is no such file"
        for name, model in settings.models.items()
        for key in _FILES
        if (file := getattr(model, key)) is not None and not Path(file).is_file()
    ]
    if wrong := [*wrong, *settings.server.broken_secrets()]:
        raise InvalidConfig("\n".join(wrong))
    if path is not None:
        settings._folder = str(path.parent.resolve())
    in_file = path is not None and settings.server.token and sources.place(("server", "token")).startswith(f"{path}:")
    if path is not None and in_file and (why := too_open(path)):
        raise InvalidConfig(f"server.token is in a file that others can read: {why}, or set server.token_file")
    return settings


def require_servable(settings: Configuration, *, insecure: bool) -> None:
    """Refuse a server without models, and one that other hosts can reach without authentication.

    Raises:
        ConfigError: no model is configured, a device does not exist, or other hosts could use the server without
            authentication and `insecure` is not set.
    """
    if not (settings.models or settings.server.factories or settings.server.remote_factories):
        raise InvalidConfig(f"no model is configured; expected at least one in the TOML file, such as\n\n{_EXAMPLE}\n")
    if missing := settings.server.missing_devices():
        raise InvalidConfig(missing)
    if (open_transports := settings.open_transports()) and not insecure:
        raise InvalidConfig(
            "\n".join(open_transports)
            + "\nOther hosts could use this server without authentication, or what they send could be read on the "
            "network. Expected these settings, or a loopback host; --insecure serves all the same, for a network that "
            "you trust (docs/security.md)"
        )


def model_settings_from_json(name: str, text: str, configured: ModelSettings | None = None) -> ModelSettings:
    """Return the settings of a model that a client loads, from a JSON object with the keys of [models.NAME].

    Args:
        configured: the configuration's settings of this model, whose dialects and robots keep their lanes of it.

    Raises:
        Refused: the settings are invalid; the message names what is wrong.
    """
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise Refused(f"settings of model {name!r} are not JSON: {error}") from error
    if "*" in name or (isinstance(given, dict) and "count" in given):
        raise Refused(f"{name!r} with a star, or count, stands for several models: load them one by one")
    try:
        model = Configuration.model_validate({"models": {name: given}}).models[name]
    except ValidationError as error:
        raise Refused("\n".join(problems(error, Configuration, lambda key: "load request"))) from error
    if configured is not None:
        model._holders = configured._holders
        if problem := model._holders.problem(name, model):
            raise Refused(problem)
    return model
