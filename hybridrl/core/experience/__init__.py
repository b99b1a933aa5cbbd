"""Experience: what a training step learns from, and the files that keep its samples.

Episodes are sorted by prompt and sample before they are packed, so the order in which they finish changes nothing.
`SynchronousExperience` samples all groups of a step with its weights. `AsynchronousExperience` keeps groups running
over the steps: which ones a step takes, and how many are started, is arithmetic on positions and versions
(`Admission`). The spool keeps finished responses, which a run that resumes within the step uses again.
"""
