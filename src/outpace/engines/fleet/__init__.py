"""Several engines behind one interface: request routing and failover."""
