"""The agent process on the node: what happens to the engine's answers, and when."""
