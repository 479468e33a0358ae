"""The built-in inference engine: continuous batching over a fixed number of slots, on one compute thread."""
