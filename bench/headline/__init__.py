"""The headline: a training job once placement knows which NUMA nodes are busy for others."""
