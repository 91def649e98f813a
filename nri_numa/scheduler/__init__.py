"""An extender of kube-scheduler that evaluates nodes, holds NUMA nodes, and binds pods."""
