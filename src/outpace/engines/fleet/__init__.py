"""Several engines as one: who gets a request, and what becomes of it when they fail."""
