"""What operators see of the agent: log lines, metrics, traces of decisions, systemd."""
