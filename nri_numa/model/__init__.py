"""Plain values: sets of CPUs, the machine, workloads, settings. Pure."""
