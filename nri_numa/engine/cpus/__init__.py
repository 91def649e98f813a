"""Which CPUs: allocation orders and thread siblings."""
