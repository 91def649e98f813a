"""Generated messages of the device plugin API; see proto/generate_cri.py."""
