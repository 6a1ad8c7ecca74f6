"""Environments of the peers, and the servers that run in them."""
