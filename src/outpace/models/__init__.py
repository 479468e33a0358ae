"""Models: loading, chat formats, LoRA adapters, and the built-in starter models."""
