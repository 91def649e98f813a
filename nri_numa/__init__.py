"""nri-numa: NUMA placement of containers through the Node Resource Interface."""

__version__ = "0.1.0"
