"""Durable state: atomic checkpoints, the journal of finished groups, the turn log, model export."""
