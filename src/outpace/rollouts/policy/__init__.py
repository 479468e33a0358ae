"""The policy client of an episode: conversations in, exact tokens out."""
