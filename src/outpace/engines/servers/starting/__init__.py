"""From settings to a server that answers: its command, its process, its first words, and why it has none."""
