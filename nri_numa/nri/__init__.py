"""The NRI link to the container runtime: the socket, registration, messages as engine types."""
