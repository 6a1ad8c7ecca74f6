"""Search over workflows: in which order should compromised units be repaired, and which policy does so best?"""
