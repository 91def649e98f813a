"""The controller, one for the cluster: capacity that others measure, told to the Nodes.

What decides is pure (`offers`, `capacity`, `nodes`); what listens, asks and writes is
around it (`server`, `sources`, `following`, `service`). No agent imports any of it.
"""
