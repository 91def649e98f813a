"""Decide about a workload: pure functions from state and request to decision."""
