"""Message classes and gRPC calls of the .proto files, created at import.

The generated modules (`control_pb2` and the others) hold the descriptor of a file and little else. The classes are made
of it by protobuf's public functions, which are the same in every version from 4.25 on. What protoc writes for Python
instead is good for the protobuf it was written for and the next major version, and fails at import anywhere else: but a
client lives in its env worker's environment, with whatever protobuf the simulator holds. gRPC's generated code pins
grpcio in the same way and does nothing that a descriptor does not tell: `stub` and `add_servicer` do it here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor import Descriptor, FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message_factory import GetMessageClass

# Our own pool. The process's default one takes a name once, and other libraries bring the messages of the Open
# Inference Protocol under the same names: whoever came second could not be imported.
_POOL = DescriptorPool()


def define(module: dict[str, Any], serialized: bytes) -> FileDescriptor:
    """Create the classes of a file, as protoc's generated code would.

    Args:
        module: names of the module that is to hold them; messages, enums and the enums' values are added to it.
        serialized: a FileDescriptorProto.
    """
    file: FileDescriptor = _POOL.AddSerializedFile(serialized)
    for name, message in file.message_types_by_name.items():
        module[name] = _message_class(message, module["__name__"])
    for name, enum in file.enum_types_by_name.items():
        module[name] = EnumTypeWrapper(enum)
        module.update((value.name, value.number) for value in enum.values)
    return file


def stub(channel: Any, service: ServiceDescriptor) -> Any:
    """The methods of a service as callables on a grpc.Channel or a grpc.aio.Channel, under their names."""
    calls = SimpleNamespace()
    for method, path, request, reply in _methods(service):
        call = getattr(channel, _kind(method))(
            path, request_serializer=request.SerializeToString, response_deserializer=reply.FromString
        )
        setattr(calls, method.name, call)
    return calls


def add_servicer(service: ServiceDescriptor, servicer: Any, server: Any) -> None:
    """Add `servicer` to a grpc.Server or a grpc.aio.Server.

    Raises:
        AttributeError: it lacks one.
    """
    import grpc

    handlers = {}
    for method, _, request, reply in _methods(service):
        handlers[method.name] = getattr(grpc, f"{_kind(method)}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=request.FromString,
            response_serializer=reply.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _message_class(message: Descriptor, module: str) -> Any:
    made = GetMessageClass(message)
    made.__module__ = module  # for help() and tracebacks; protobuf itself says None
    for inner in message.nested_types:
        nested = _message_class(inner, module)
        if not hasattr(made, inner.name):  # protobuf's implementation in Python leaves that to its generated code
            setattr(made, inner.name, nested)
    return made


def _methods(service: ServiceDescriptor) -> list[tuple[MethodDescriptor, str, Any, Any]]:
    """Of each: what it is, its path, classes of request and reply."""
    return [
        (
            method,
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
        )
        for method in service.methods
    ]


def _kind(method: MethodDescriptor) -> str:
    """As gRPC names it: unary_unary and the three with streams."""
    return "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
