"""Environments: instances of the classes of the user, in this process or in their own."""
