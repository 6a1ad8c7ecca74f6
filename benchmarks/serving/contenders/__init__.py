"""The contenders, one file each."""
