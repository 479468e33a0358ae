"""Subcommands of `outpace` that need more than a few lines; `outpace.cli` parses their arguments."""
