"""Files, names and commands of other systems.

verl's tools, interactions, agent loops, graders and checkpoints, and what `import verl` finds without it; SkyRL's
environments; keys of verl, SkyRL and AReaL, and `hybridrl migrate`. A checkpoint of verl is read in place.
"""
