"""Rows of a file -> chat template -> token ids, and their order. Knows neither models nor rewards."""
