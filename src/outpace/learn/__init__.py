"""How gradients are made: advantages, losses, packing, the torch learner."""
