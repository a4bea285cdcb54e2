"""What happened in a run: its records, where they are written, and what they say.

``read`` gives the records of a file back; the command ``gradlift report`` makes a page of them.
"""

from gradlift.report.record_file import read
from gradlift.report.records import Run, StepRecord

__all__ = ["Run", "StepRecord", "read"]
