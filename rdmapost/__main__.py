"""``python -m rdmapost`` is the same as ``rdmapost``."""

from .cli import main

main()
