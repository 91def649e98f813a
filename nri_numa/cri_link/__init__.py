"""The CRI link, for runtimes without NRI: containers are watched, and given their CPUs late."""
