"""What placement gains on this machine: measured here, with own small loops, and never modelled."""
