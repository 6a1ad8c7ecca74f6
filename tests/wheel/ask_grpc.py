"""Ask a server's gRPC health and reflection; run by the Python of an environment with the server's packages."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
    (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]), timeout=30)
    assert answer.file_descriptor_response.file_descriptor_proto, answer
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(health.status), asked.file_containing_symbol)
