"""What GPUs and links can do: data files with a source for every number, and their reader."""
