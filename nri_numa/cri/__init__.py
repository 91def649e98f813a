"""CRI link for runtimes without NRI: it watches containers and updates them after creation."""
