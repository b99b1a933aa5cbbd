"""What is written for SkyRL."""
