"""Environments and keys of SkyRL."""
