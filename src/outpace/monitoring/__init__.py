"""Monitoring: metrics, console output, the files of the run directory and callbacks."""
