"""NRI's wire protocol: multiplexer, ttrpc and NRI events, in both roles. Pure."""
