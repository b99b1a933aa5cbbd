"""Tools, agent loops, graders and checkpoints of verl, and stand-ins for the modules that such code imports."""
