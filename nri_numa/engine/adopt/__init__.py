"""Containers that came without us: what they carry, read back and verified."""
