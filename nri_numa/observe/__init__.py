"""Output for operators: log lines, metrics, traces of decisions, messages to systemd."""
