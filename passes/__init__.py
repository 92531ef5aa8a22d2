"""Graph passes, one a file, named as in the pipeline."""
