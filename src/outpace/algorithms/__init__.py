"""Policy losses, advantages, corrections and KL: small pure functions that the config composes. Never imports torch."""
