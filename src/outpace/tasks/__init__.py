"""Where problems come from: generated tasks, datasets, their registry and their resumable order."""
