"""What survives: the journal of finished groups, atomic checkpoints, export."""
