# Made by protos/generate.py of open_inference.proto; do not edit.
"""gRPC services of open_inference.proto, under the names that gRPC's own generator gives them."""

from jurybox.protocol import messages
from jurybox.protocol.open_inference_pb2 import DESCRIPTOR


def GRPCInferenceServiceStub(channel):
    """The service's calls on a channel."""
    return messages.stub(channel, DESCRIPTOR.services_by_name["GRPCInferenceService"])


def add_GRPCInferenceServiceServicer_to_server(servicer, server):
    """Let the servicer answer them on a server."""
    messages.add_servicer(DESCRIPTOR.services_by_name["GRPCInferenceService"], servicer, server)
