"""Ways to a server on another host: the same lanes, with the rows in this process and their bytes in the messages."""
