"""Adapters for environments of other libraries: gymnasium, OpenEnv and verifiers."""
