"""Other people's environments, made to fit: gymnasium's, OpenEnv's, those of verifiers."""
