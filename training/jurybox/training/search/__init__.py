"""Search over workflows: in which order should compromised units be repaired, and what policy does it best?"""
