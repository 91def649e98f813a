"""A container runtime in memory that speaks NRI, and the demo that plays on it."""
