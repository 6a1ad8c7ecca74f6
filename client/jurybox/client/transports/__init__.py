"""The client's transports to an engine."""
