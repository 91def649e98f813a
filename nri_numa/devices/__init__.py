"""Which devices a container has before it starts, and on which NUMA nodes they are."""
