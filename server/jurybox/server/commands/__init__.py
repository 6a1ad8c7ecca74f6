"""The commands of the console script, one module each; nothing here imports torch before it is needed."""
