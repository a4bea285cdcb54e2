"""What of the package's description depends on where its repository is; see ``make dist``.

PyPI shows the README away from the pages it links to. With ``GRADLIFT_URL``, the address of the
repository, its links and pictures become absolute, and the package names its home.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup


def absolute(text: str, url: str) -> str:
    """Markdown with its links to files of the repository below ``url``."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({url}/{kind}/main/{match[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", link, text)


url = os.environ.get("GRADLIFT_URL", "").rstrip("/")
readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
homes = {"Repository": url, "Documentation": f"{url}/blob/main/docs/index.md"}
setup(
    long_description=absolute(readme, url) if url else readme,
    long_description_content_type="text/markdown",
    project_urls=homes if url else {},
)
