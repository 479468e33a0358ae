"""Inference servers as engines over HTTP: vLLM and SGLang."""
