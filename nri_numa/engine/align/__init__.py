"""Which NUMA nodes: hints, their merge, and the policies that judge the outcome."""
