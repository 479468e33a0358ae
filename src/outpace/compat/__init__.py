"""Thin layers over `outpace.Trainer` with the names and arguments of other libraries, to run their scripts."""
