"""One run, from a config to its end: plan, build components, start, resume, stop."""
