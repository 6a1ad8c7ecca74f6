"""As much of HTTP/2 (RFC 9113) as gRPC needs, for calls that are asked thousands of times a second.

grpc.aio takes 310 us of CPU for a call that does nothing, on a machine where this takes 33 us
(benchmarks/gateway/README.md). So inference is answered here, and every other call is handed on to grpc.aio.
"""
