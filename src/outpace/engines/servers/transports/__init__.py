"""Weight transports: each module implements `Transport` for one way of transferring snapshots."""
