"""The server's settings: their model, their sources, checks of addresses."""
