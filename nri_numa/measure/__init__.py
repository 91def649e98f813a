"""Measure what placement gains on this machine, with small loops; nothing is modelled."""
