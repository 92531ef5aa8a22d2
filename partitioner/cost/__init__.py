"""Bytes and seconds of operators, collectives and optimizer steps."""
