"""Data that outlives the agent: the checkpoint, its journal and documents, and their files."""
