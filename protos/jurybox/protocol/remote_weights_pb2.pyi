from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightsChunk(_message.Message):
    __slots__ = ("offset", "data", "crc")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    crc: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc: _Optional[int] = ...) -> None: ...

class OpenPublisher(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class BeginPublication(_message.Message):
    __slots__ = ("layout_hash", "bfloat16", "changed_only", "version", "check_finite", "extra", "only")
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    CHANGED_ONLY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECK_FINITE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    layout_hash: bytes
    bfloat16: bool
    changed_only: bool
    version: int
    check_finite: bool
    extra: bytes
    only: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layout_hash: _Optional[bytes] = ..., bfloat16: _Optional[bool] = ..., changed_only: _Optional[bool] = ..., version: _Optional[int] = ..., check_finite: _Optional[bool] = ..., extra: _Optional[bytes] = ..., only: _Optional[_Iterable[str]] = ...) -> None: ...

class EndPublication(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("open", "begin", "chunk", "end")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    open: OpenPublisher
    begin: BeginPublication
    chunk: WeightsChunk
    end: EndPublication
    def __init__(self, open: _Optional[_Union[OpenPublisher, _Mapping]] = ..., begin: _Optional[_Union[BeginPublication, _Mapping]] = ..., chunk: _Optional[_Union[WeightsChunk, _Mapping]] = ..., end: _Optional[_Union[EndPublication, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("layout", "newest", "extra_bytes", "chunk_bytes")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    EXTRA_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    layout: bytes
    newest: int
    extra_bytes: int
    chunk_bytes: int
    def __init__(self, layout: _Optional[bytes] = ..., newest: _Optional[int] = ..., extra_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class WeightsRefusal(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("opened", "published", "refusal")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    published: int
    refusal: WeightsRefusal
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., published: _Optional[int] = ..., refusal: _Optional[_Union[WeightsRefusal, _Mapping]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("model", "newer_than", "look")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NEWER_THAN_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    model: str
    newer_than: int
    look: bool
    def __init__(self, model: _Optional[str] = ..., newer_than: _Optional[int] = ..., look: _Optional[bool] = ...) -> None: ...

class WeightsHead(_message.Message):
    __slots__ = ("newest", "version", "layout", "extra", "age", "max_lag")
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    MAX_LAG_FIELD_NUMBER: _ClassVar[int]
    newest: int
    version: int
    layout: bytes
    extra: bytes
    age: float
    max_lag: int
    def __init__(self, newest: _Optional[int] = ..., version: _Optional[int] = ..., layout: _Optional[bytes] = ..., extra: _Optional[bytes] = ..., age: _Optional[float] = ..., max_lag: _Optional[int] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("head", "chunk", "refusal")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    head: WeightsHead
    chunk: WeightsChunk
    refusal: WeightsRefusal
    def __init__(self, head: _Optional[_Union[WeightsHead, _Mapping]] = ..., chunk: _Optional[_Union[WeightsChunk, _Mapping]] = ..., refusal: _Optional[_Union[WeightsRefusal, _Mapping]] = ...) -> None: ...
