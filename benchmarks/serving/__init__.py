"""Requests per second of a server with many small clients, their latency, and the CPU time."""
