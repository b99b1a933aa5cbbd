"""Saved shards -> a Hugging Face directory, which is proved equal to them. `python -m hybridrl.model_merger --help`"""
