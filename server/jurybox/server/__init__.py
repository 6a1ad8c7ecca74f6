"""The server: engines, gateway, relay, supervisor and their configuration."""
