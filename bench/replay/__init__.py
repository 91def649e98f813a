"""Density and waste: pods that come and go on one machine, replayed under several placements."""
