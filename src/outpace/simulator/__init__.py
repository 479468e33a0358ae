"""Simulator: the real scheduler on a virtual clock, with simulated engines, learner, environments and faults."""
