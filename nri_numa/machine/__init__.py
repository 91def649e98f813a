"""What the machine is: CPUs, caches, NUMA nodes, memory; its changes; cgroups, read and written."""
