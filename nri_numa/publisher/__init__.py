"""What Kubernetes users see of this node: written to the API server by a process without root.

The agent on the node has no credentials. This process reads the agent's unix socket and nothing
else of the node, works out what should be in the API server (`wanted`, `outputs`), and brings it
there no faster than configured (`outbox`, `writer`, `publisher`).
"""
