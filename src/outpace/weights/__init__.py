"""Weight sync: how a policy gets from the learner to the engines."""
