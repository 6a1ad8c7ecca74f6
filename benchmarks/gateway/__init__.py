"""The gateway beside Triton's Python backend."""
