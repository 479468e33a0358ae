"""The policy as an episode sees it: conversations in, exact tokens out."""
