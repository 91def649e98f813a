"""Generated CRI and PodResources messages; see proto/generate_cri.py."""
