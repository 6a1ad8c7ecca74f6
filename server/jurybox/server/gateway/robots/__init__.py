"""Robots: a websocket server for policies that answer observations with chunks of actions."""
