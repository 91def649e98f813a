"""What is asked over gRPC: the container runtime (CRI), and what the kubelet gave to whom."""
