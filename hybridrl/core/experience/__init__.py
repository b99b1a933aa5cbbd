"""Experience: the scored episodes of a training step, and the files that keep its samples.

Episodes are sorted by prompt and sample before they are packed, so the order in which they finish changes nothing.
`SynchronousExperience` samples all groups of a step with its weights. `AsynchronousExperience` keeps groups running
over the steps: arithmetic on positions and versions (`Admission`) decides which groups a step takes, and how many are
started. The spool keeps finished responses; a run that resumes within the step uses them again.
"""
