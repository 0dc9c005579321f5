"""The exit codes of the command ``rdmapost``; 0 is success."""

FAILED, USAGE, NO_DEVICE = 1, 2, 3
INTERRUPTED = 130
