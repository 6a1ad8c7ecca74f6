"""The gateway: HTTP, gRPC and WebSocket endpoints. To the server it is an ordinary client."""
