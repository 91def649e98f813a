"""This node in the API server, published by a process without root.

The agent on the node has no credentials. This process reads the agent's unix socket and nothing
else of the node, computes the desired objects (`desired_objects`, `outputs`), and writes them no
faster than configured (`outbox`, `writer`, `publisher`).
"""
