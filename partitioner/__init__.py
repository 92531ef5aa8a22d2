"""A compiler-style graph partitioning pass for fully sharded training."""

__version__ = "0.1.0"
