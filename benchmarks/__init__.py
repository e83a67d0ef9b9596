"""Measurements. Nothing here is a test: figures depend on the machine, which each of them names."""
