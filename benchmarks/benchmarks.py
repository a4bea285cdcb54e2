"""What ``import benchmarks`` finds in a script that is run by its path: the folder it lies in.

Python puts a script's own folder on its path, and not the source tree's. There this file is
``benchmarks``; it passes for the package, and finds gradlift as ``PYTHONPATH=.`` would.
"""

import sys
from pathlib import Path

_folder = Path(__file__).resolve().parent
__path__ = [str(_folder)]
sys.path.insert(1, str(_folder.parent))
