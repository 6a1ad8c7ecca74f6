"""The gateway: HTTP, gRPC and websockets. To the server it is one more client."""
