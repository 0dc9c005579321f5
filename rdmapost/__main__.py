"""``python -m rdmapost`` is ``rdmapost``."""

from .cli import main

main()
