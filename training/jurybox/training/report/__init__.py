"""Reports of trainings: one self-contained HTML file that says what was learned, and whether it was anything."""
