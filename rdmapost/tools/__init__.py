"""Whole jobs made of the public verbs; nothing in the core imports them."""
