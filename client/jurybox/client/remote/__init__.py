"""Links to a server on another host. Lanes keep their rows in this process and send them in messages."""
