"""When things happen: a pure core that turns events into actions, and the driver that carries them out."""
