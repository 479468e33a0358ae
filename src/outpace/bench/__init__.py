"""How fast it is, against the limit of the hardware."""
