"""Requests: annotations, rules, defaults, demand, load."""
