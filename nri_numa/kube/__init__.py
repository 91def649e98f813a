"""The API server, for every process that talks to it: one client, one watch and one Lease."""
