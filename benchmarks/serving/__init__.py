"""How many requests a second a server answers to many small clients, how late, and at what cost in CPU."""
