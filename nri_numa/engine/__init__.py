"""What to do about a workload: pure functions from state and request to decision."""
