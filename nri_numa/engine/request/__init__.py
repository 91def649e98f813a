"""What is asked for: annotations, rules, defaults, demand, load."""
