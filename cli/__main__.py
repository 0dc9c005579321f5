"""``python -m rdmapost.cli`` is ``rdmapost``."""

from . import main

main()
