"""Task sources: generated tasks, datasets, the registry, and the resumable task order."""
