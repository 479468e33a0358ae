"""Runs the components, in this process or in child processes, behind the same protocols."""
