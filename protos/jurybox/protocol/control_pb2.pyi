from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorSpecMessage(_message.Message):
    __slots__ = ("name", "dtype", "shape", "capacity", "finite")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    capacity: int
    finite: bool
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., capacity: _Optional[int] = ..., finite: _Optional[bool] = ...) -> None: ...

class ParameterMessage(_message.Message):
    __slots__ = ("name", "input", "default_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    input: str
    default_json: str
    def __init__(self, name: _Optional[str] = ..., input: _Optional[str] = ..., default_json: _Optional[str] = ...) -> None: ...

class ModelMessage(_message.Message):
    __slots__ = ("name", "index", "inputs", "outputs", "state", "reason", "max_batch", "arena", "arena_rows", "weights", "digest", "settled", "session_state", "parameters", "engines", "max_lag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    ARENA_ROWS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    SESSION_STATE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    MAX_LAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    index: int
    inputs: _containers.RepeatedCompositeFieldContainer[TensorSpecMessage]
    outputs: _containers.RepeatedCompositeFieldContainer[TensorSpecMessage]
    state: str
    reason: str
    max_batch: int
    arena: str
    arena_rows: int
    weights: str
    digest: str
    settled: bool
    session_state: _containers.RepeatedCompositeFieldContainer[TensorSpecMessage]
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterMessage]
    engines: _containers.RepeatedScalarFieldContainer[int]
    max_lag: int
    def __init__(self, name: _Optional[str] = ..., index: _Optional[int] = ..., inputs: _Optional[_Iterable[_Union[TensorSpecMessage, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[TensorSpecMessage, _Mapping]]] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., max_batch: _Optional[int] = ..., arena: _Optional[str] = ..., arena_rows: _Optional[int] = ..., weights: _Optional[str] = ..., digest: _Optional[str] = ..., settled: _Optional[bool] = ..., session_state: _Optional[_Iterable[_Union[TensorSpecMessage, _Mapping]]] = ..., parameters: _Optional[_Iterable[_Union[ParameterMessage, _Mapping]]] = ..., engines: _Optional[_Iterable[int]] = ..., max_lag: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("client", "pid")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    client: str
    pid: int
    def __init__(self, client: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("server_id", "build", "scoreboard", "engines", "models", "transport")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    SCOREBOARD_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    build: str
    scoreboard: str
    engines: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    transport: str
    def __init__(self, server_id: _Optional[str] = ..., build: _Optional[str] = ..., scoreboard: _Optional[str] = ..., engines: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., transport: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("model", "rows", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    rows: int
    priority: int
    def __init__(self, model: _Optional[str] = ..., rows: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("model", "lane", "lease", "first_row", "rows", "engine", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: ModelMessage
    lane: int
    lease: int
    first_row: int
    rows: int
    engine: int
    priority: int
    def __init__(self, model: _Optional[_Union[ModelMessage, _Mapping]] = ..., lane: _Optional[int] = ..., lease: _Optional[int] = ..., first_row: _Optional[int] = ..., rows: _Optional[int] = ..., engine: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lane", "lease")
    LANE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lane: int
    lease: int
    def __init__(self, lane: _Optional[int] = ..., lease: _Optional[int] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("model", "settings_json", "keep", "remote")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    model: str
    settings_json: str
    keep: float
    remote: bool
    def __init__(self, model: _Optional[str] = ..., settings_json: _Optional[str] = ..., keep: _Optional[float] = ..., remote: _Optional[bool] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("model", "keep")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    model: str
    keep: float
    def __init__(self, model: _Optional[str] = ..., keep: _Optional[float] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("pause",)
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    pause: bool
    def __init__(self, pause: _Optional[bool] = ...) -> None: ...

class RegionPlace(_message.Message):
    __slots__ = ("tensor", "handle", "offset")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    handle: bytes
    offset: int
    def __init__(self, tensor: _Optional[str] = ..., handle: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class BindRequest(_message.Message):
    __slots__ = ("lane", "lease", "first", "rows", "inputs", "outputs", "event", "end")
    LANE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    lane: int
    lease: int
    first: int
    rows: int
    inputs: _containers.RepeatedCompositeFieldContainer[RegionPlace]
    outputs: _containers.RepeatedCompositeFieldContainer[RegionPlace]
    event: bytes
    end: bool
    def __init__(self, lane: _Optional[int] = ..., lease: _Optional[int] = ..., first: _Optional[int] = ..., rows: _Optional[int] = ..., inputs: _Optional[_Iterable[_Union[RegionPlace, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[RegionPlace, _Mapping]]] = ..., event: _Optional[bytes] = ..., end: _Optional[bool] = ...) -> None: ...

class BindingMessage(_message.Message):
    __slots__ = ("settled", "reason")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    settled: bool
    reason: str
    def __init__(self, settled: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ErrorMessage(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusMessage(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("hello", "lease", "release", "status", "model", "load", "unload", "keep", "sleep", "wake", "pause", "bind")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    BIND_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    lease: LeaseRequest
    release: ReleaseRequest
    status: StatusRequest
    model: ModelRequest
    load: LoadRequest
    unload: UnloadRequest
    keep: KeepRequest
    sleep: SleepRequest
    wake: WakeRequest
    pause: PauseRequest
    bind: BindRequest
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., lease: _Optional[_Union[LeaseRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., status: _Optional[_Union[StatusRequest, _Mapping]] = ..., model: _Optional[_Union[ModelRequest, _Mapping]] = ..., load: _Optional[_Union[LoadRequest, _Mapping]] = ..., unload: _Optional[_Union[UnloadRequest, _Mapping]] = ..., keep: _Optional[_Union[KeepRequest, _Mapping]] = ..., sleep: _Optional[_Union[SleepRequest, _Mapping]] = ..., wake: _Optional[_Union[WakeRequest, _Mapping]] = ..., pause: _Optional[_Union[PauseRequest, _Mapping]] = ..., bind: _Optional[_Union[BindRequest, _Mapping]] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("error", "server", "lease", "status", "model", "done", "binding")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    error: ErrorMessage
    server: ServerMessage
    lease: Lease
    status: StatusMessage
    model: ModelMessage
    done: Done
    binding: BindingMessage
    def __init__(self, error: _Optional[_Union[ErrorMessage, _Mapping]] = ..., server: _Optional[_Union[ServerMessage, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., status: _Optional[_Union[StatusMessage, _Mapping]] = ..., model: _Optional[_Union[ModelMessage, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., binding: _Optional[_Union[BindingMessage, _Mapping]] = ...) -> None: ...
