"""What Prometheus is told: the table of metrics, and the collector that reads them from the board."""
