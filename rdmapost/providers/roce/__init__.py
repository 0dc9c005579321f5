"""Devices that speak RoCE v2 over a UDP socket."""
