"""The agent process on the node: events, state, cgroups and outputs around the engine."""
