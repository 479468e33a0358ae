"""How a policy travels from the learner to the engines."""
