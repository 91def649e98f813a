"""What-if: pods from manifests, placed on a machine by the engine that does it for real."""
