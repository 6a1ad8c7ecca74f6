"""[models.NAME]: the source of a model, its batching, and the rows that its users need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, JsonValue, PrivateAttr, model_validator

from jurybox.protocol.parameters import MOST_PARAMETERS, Parameter
from jurybox.protocol.spec import OIP_NAMES, TensorSpec
from jurybox.server.settings.values import Factory, ParameterName, Strict, check_absolute

_AUTO_ARENA_BYTES, _AUTO_ROWS = 128 << 20, 4096
_AUTO_CLIENTS, _AUTO_LANE_ROWS = 128, 64


def _check_dtype(text: str) -> str:
    if text not in OIP_NAMES:
        raise ValueError(f"expected one of {', '.join(OIP_NAMES)}")
    return text


class TensorSettings(Strict):
    """One tensor of an exported model: dtype, and the shape of ONE row."""

    dtype: Annotated[str, AfterValidator(_check_dtype)]
    shape: list[Annotated[int, Field(ge=-1)]] = Field(default=[])
    capacity: int = Field(default=0, ge=0)
    finite: bool = False

    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, tuple(self.shape), self.capacity, self.finite)

    @model_validator(mode="after")
    def _is_a_spec(self) -> TensorSettings:
        self.spec()
        return self


class ParameterSettings(Strict):
    """A parameter of requests that is an input of the model: its value if none comes, and the input's name."""

    default: bool | int | float | str
    input: Annotated[str, Field(min_length=1, max_length=200)] | None = None


@dataclass(slots=True)
class Holders:
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


class ModelSettings(Strict):
    """[models.NAME]: the source of a model and its batching. docs/operations.md describes each setting."""

    factory: Factory | None = None
    exported: str | None = None
    args: dict[str, JsonValue] = Field(default={})
    weights: str | None = None
    python: Annotated[str, AfterValidator(check_absolute)] | None = None
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
    state: dict[str, TensorSettings] | None = None
    _holders: Holders = PrivateAttr(default_factory=Holders)

    @property
    def holders(self) -> Holders:
        """The server's own users of the model."""
        return self._holders

    def keep_lanes_of(self, holders: Holders) -> None:
        """Set the server's own users of the model; `Holders.problem` says whether there are rows for their lanes."""
        self._holders = holders

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSettings:
        if (self.factory is None) == (self.exported is None):
            both = "both came" if self.factory else "neither came"
            raise ValueError(f'expected either factory = "module:callable" or exported = "file.pt2", {both}')
        if self.exported is not None and self.args:
            raise ValueError("args are the arguments of a factory, an exported model takes none")
        if self.factory is not None and (self.inputs or self.outputs or self.state):
            raise ValueError("inputs, outputs and state are for exported models, a factory says its own")
        if self.state and not (self.inputs and self.outputs):
            raise ValueError(
                "state is what an exported model takes after its inputs and returns after its outputs, expected inputs "
                "and outputs with it"
            )
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
        if self.compile or self.dtype or self.channels_last or self.state:
            raise ValueError("a package is already compiled, expected no compile, dtype, channels_last, state with aot")
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
