"""An extender of kube-scheduler that judges nodes, holds NUMA nodes, and binds pods."""
