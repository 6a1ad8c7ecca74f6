"""The walls between a server and whoever reaches its ports: tokens, TLS, CURVE keys, limits. See docs/security.md."""
