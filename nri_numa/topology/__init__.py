"""What the machine is: CPUs, cores, caches, sockets, NUMA nodes, memory and distances."""
