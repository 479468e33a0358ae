"""How an episode is made."""
