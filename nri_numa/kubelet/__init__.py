"""The kubelet on this node: what it does beside us."""
