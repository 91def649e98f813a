"""What the scheduler is told: an extender that judges nodes, holds NUMA nodes, and binds pods."""
