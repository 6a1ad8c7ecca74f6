"""Reports of trainings: self-contained HTML files with the results."""
