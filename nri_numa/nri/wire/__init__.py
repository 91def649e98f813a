"""How bytes become NRI events and back: multiplexer, ttrpc, NRI. Pure; both roles."""
