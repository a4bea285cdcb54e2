"""``python -m gradlift`` is the command ``gradlift``."""

import sys

from gradlift.cli import main

if __name__ == "__main__":
    sys.exit(main())
