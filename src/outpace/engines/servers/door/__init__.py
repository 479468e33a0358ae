"""The engine that a server is, seen from inside outpace: requests, updates, health, partial output."""
