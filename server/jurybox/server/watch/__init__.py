"""Observing a server: snapshots of the scoreboard, and the differences between them."""
