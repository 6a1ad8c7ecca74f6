"""The gateway: HTTP for whoever asks how the server is. To the server it is one more client."""
