"""Links to a server on another host: the same lanes, with rows in this process whose bytes are sent in messages."""
