"""What the man pages and the InfiniBand standard say, as data: states, timers, wire formats."""
