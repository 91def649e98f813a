"""Explanations of placements, in words."""
