# Made by protos/generate.py of remote_weights.proto; do not edit.
"""gRPC services of remote_weights.proto, under the names that gRPC's own generator gives them."""

from jurybox.protocol import messages
from jurybox.protocol.remote_weights_pb2 import DESCRIPTOR


def RemoteWeightsStub(channel):
    """The service's calls on a channel."""
    return messages.stub(channel, DESCRIPTOR.services_by_name["RemoteWeights"])


def add_RemoteWeightsServicer_to_server(servicer, server):
    """Let the servicer answer them on a server."""
    messages.add_servicer(DESCRIPTOR.services_by_name["RemoteWeights"], servicer, server)
