"""The server's settings: the model of a configuration, where it is read from, what may be listened on."""
