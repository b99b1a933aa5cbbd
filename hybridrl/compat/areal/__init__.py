"""Keys of AReaL."""
