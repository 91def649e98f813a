"""NRI link to the container runtime: socket, registration, messages as engine types."""
