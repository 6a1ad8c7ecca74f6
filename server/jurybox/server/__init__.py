"""The server: engines, gateway, supervisor and what configures them."""
