"""Learning algorithms: one class in one file each, without processes, environments and files."""
