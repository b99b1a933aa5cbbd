"""Tools and environments that come with hybridrl."""
