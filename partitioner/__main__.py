"""``python -m partitioner`` is ``partition``."""

from partitioner.cli import main

main()
