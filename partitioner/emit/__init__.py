"""Doors out: a plan becomes FSDP2 code that a person can read."""
