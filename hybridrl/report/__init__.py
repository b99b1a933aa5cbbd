"""`report.html`: everything about a run, or several, in one file that opens without a network.

`hybridrl report RUN [RUN2 ...]` writes it. It reads the directories of runs, and needs no device.
"""

from hybridrl.report.page import write_report

__all__ = ["write_report"]
