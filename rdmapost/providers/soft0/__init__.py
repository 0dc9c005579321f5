"""The soft device: its provider, and the engine that carries out what is posted."""
