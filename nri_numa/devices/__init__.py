"""Devices of a container before it starts, and their NUMA nodes."""
