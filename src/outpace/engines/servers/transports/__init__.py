"""How snapshots reach servers: each module is one way, and implements `outpace.engines.servers.spec.Transport`."""
