"""Work requests: their classes, the rules of the man pages, the queues that they are posted to."""
