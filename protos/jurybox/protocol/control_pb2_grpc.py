# Made by protos/generate.py of control.proto; do not edit.
"""gRPC services of control.proto, under the names that gRPC's own generator gives them."""

from jurybox.protocol import messages
from jurybox.protocol.control_pb2 import DESCRIPTOR


def ServerStatusStub(channel):
    """The service's calls on a channel."""
    return messages.stub(channel, DESCRIPTOR.services_by_name["ServerStatus"])


def add_ServerStatusServicer_to_server(servicer, server):
    """Let the servicer answer them on a server."""
    messages.add_servicer(DESCRIPTOR.services_by_name["ServerStatus"], servicer, server)
