"""Plain values that go into the engine and come out: workloads, settings, answers."""
