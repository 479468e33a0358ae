"""The mathematics: small pure functions that the config composes. Nothing here loads torch or knows of processes."""
