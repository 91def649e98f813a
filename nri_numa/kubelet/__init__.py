"""Kubelet of this node: its configuration, its grants, and the resources of its pods."""
