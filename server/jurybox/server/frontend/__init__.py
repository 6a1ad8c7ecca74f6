"""What all doors of a process share: lanes, coalescing, predictions of returning clients, sequences."""
