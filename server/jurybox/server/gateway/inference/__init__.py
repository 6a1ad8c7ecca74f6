"""The Open Inference Protocol over HTTP and gRPC: requests, parameters, models, shared memory, the repository."""
