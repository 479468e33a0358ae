"""Reward functions and grading."""
