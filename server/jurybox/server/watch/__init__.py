"""Watching a server: what the scoreboard shows at two moments, and what happened between them."""
