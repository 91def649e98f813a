"""Why a container is where it is, in words."""
