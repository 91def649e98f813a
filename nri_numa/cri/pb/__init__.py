"""Generated CRI messages; see proto/generate_cri.py."""
