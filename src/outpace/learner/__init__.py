"""The torch learner: packing, forward passes, loss assembly, optimizer, state."""
