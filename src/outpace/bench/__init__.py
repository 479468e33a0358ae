"""Benchmarks: each measures one part of outpace against a fixed limit (`outpace bench`)."""
