"""What is written for verl: tools, agent loops, graders, checkpoints, and the modules that such code imports."""
