"""Robots: a WebSocket server for policies that answer observations with chunks of actions."""
