"""The controller, one for the cluster: capacity that others measure, and what is evicted.

What decides is pure (`capacity`, `evictor`, `stuck_pods`); what listens, asks and writes is around
it (`sources`, `service`, `overview`, `verdicts`). No agent imports any of it.
"""
