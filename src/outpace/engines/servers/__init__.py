"""Inference servers over HTTP as engines: vLLM, SGLang, and whoever else can take tokens and give tokens."""
