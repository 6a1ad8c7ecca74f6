"""What `jurybox doctor` looks at."""
