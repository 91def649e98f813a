"""The kubelet on this node: its configuration, its grants, and what it gave to pods."""
