"""Merge saved shards into a Hugging Face directory and verify it. `python -m hybridrl.model_merger --help`"""
