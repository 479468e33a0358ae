"""Who samples tokens."""
