"""The CRI link, for runtimes without NRI: containers are followed, and given their CPUs late."""
