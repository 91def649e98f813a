"""A cluster by its objects: Nodes, NodeResourceTopology and Pods, read into values. Pure."""
