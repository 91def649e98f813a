"""CPUs and memory nodes of one container: from a list, or computed."""
