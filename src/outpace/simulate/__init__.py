"""The controller's own mind under a virtual clock, with modelled engines, learner, environments and faults."""
