"""Watching a server: what the board shows at two moments, and what happened between them."""
