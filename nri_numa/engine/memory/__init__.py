"""Which memory: grants, tiers, and the kubelet's Memory Manager."""
