"""Machine: its CPUs, caches, NUMA nodes and memory, their changes and use; cgroups."""
