"""Talking to the container runtime: the NRI link, CRI, and an embedded runtime."""
