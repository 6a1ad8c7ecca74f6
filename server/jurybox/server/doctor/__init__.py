"""The checks of `jurybox doctor`."""
