"""Rollouts: from a group order to scored episodes."""
