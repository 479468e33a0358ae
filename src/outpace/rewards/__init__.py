"""How an episode is judged."""
