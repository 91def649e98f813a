"""The DRA driver: claims of the CPUs and memory of NUMA nodes, prepared for the kubelet."""
