"""What outlives the agent: the checkpoint, its journal and documents, and the files they are in."""
