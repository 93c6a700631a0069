"""What the site adds to the pages in docs/: pages from elsewhere in the repository, and the CLI's.

Links between all of them are written as files of the repository have them, so that they work there
too; here they become links of the site.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# File of the repository → page of the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "measurements/kernels.md": "kernels.md",
    "recipes/README.md": "training.md",
    "src/lopa/tiny/README.md": "tiny.md",
}
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    sys.path.insert(0, str(Path(__file__).parent))
    from cli_pages import command_line

    files.append(File.generated(config, "cli.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    own = {site: source for source, site in ELSEWHERE.items()}.get(here, f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        path, hash_sign, anchor = found[1].partition("#")
        if not path or "://" in path:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(own), path))
        site = ELSEWHERE.get(target) or target.removeprefix("docs/")
        return f"]({posixpath.relpath(site, posixpath.dirname(here) or '.')}{hash_sign}{anchor})"

    return _LINK.sub(link, markdown)
