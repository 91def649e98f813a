"""Generated messages of the DRA and plugin registration APIs; see proto/generate_cri.py."""
