"""What a scheduler that sees NUMA nodes is worth: a stream of pods on a real control plane."""
