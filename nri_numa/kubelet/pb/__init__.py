"""Generated PodResources messages; see proto/generate_cri.py."""
