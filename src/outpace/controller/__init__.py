"""The controller: a pure scheduler that turns events into actions, and the driver that carries them out."""
