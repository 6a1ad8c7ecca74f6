"""Protocols of other projects that the gateway speaks, each bound to a model."""
