"""What a model may call, and what it hears of it."""
