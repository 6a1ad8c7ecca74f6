"""Access to a server's ports: tokens, TLS, CURVE keys, limits. See docs/security.md."""
