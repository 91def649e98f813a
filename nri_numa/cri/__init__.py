"""CRI: the link to runtimes without NRI, and the kubelet's PodResources."""
