"""Scoring a policy on held-out prompts."""
