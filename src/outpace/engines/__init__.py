"""Inference engines: the embedded engine, inference servers, and the fleet that routes requests to them."""
