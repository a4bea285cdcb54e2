"""What ``import benchmarks`` finds in a script of this folder that is run by its path.

The same as ``benchmarks/benchmarks.py``, one folder further down.
"""

import sys
from pathlib import Path

_folder = Path(__file__).resolve().parents[1]
__path__ = [str(_folder)]
sys.path.insert(1, str(_folder.parent))
