"""What machines can do: a catalogue of GPUs and links, every number with its source."""
