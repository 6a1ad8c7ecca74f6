from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Ticket(_message.Message):
    __slots__ = ("sequence", "lane", "lease", "first_row", "rows", "submitted_ns", "deadline_ns", "version", "epoch")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_NS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    lane: int
    lease: int
    first_row: int
    rows: int
    submitted_ns: int
    deadline_ns: int
    version: int
    epoch: int
    def __init__(self, sequence: _Optional[int] = ..., lane: _Optional[int] = ..., lease: _Optional[int] = ..., first_row: _Optional[int] = ..., rows: _Optional[int] = ..., submitted_ns: _Optional[int] = ..., deadline_ns: _Optional[int] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("sequence", "code", "message", "version", "epoch")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    code: int
    message: str
    version: int
    epoch: int
    def __init__(self, sequence: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...
