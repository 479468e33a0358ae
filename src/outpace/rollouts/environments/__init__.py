"""Environments: instances of user classes, in the rollout worker's process or in separate processes."""
