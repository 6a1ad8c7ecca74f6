"""Reports of trainings: one self-contained HTML file with the results."""
