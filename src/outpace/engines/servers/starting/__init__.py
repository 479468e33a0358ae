"""Launching servers: command lines, processes, readiness, and the causes of failed starts."""
