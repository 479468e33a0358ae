"""The `Engine` protocol over one server: requests, weight updates, health, partial output."""
