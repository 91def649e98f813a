"""The device plugin: exclusive CPUs as an extended resource that the stock scheduler counts."""
