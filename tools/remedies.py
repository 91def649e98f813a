"""The remedies beside the page, from docs/troubleshooting.md: ``python -m tools.remedies``.

The agent serves them, so that the way from a refusal to what can be done about it needs no other
host, and is of its version. Only what that page is written with is understood: paragraphs, blocks
of text, code, bold text and links, whose targets are left out.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Final

from nri_numa.model.reasons import RejectionReason
from tools.docs_reasons import MEANING_AND_REMEDY, WAITING

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "docs/troubleshooting.md"
PAGE: Final = ROOT / "nri_numa/web/static/remedies.html"

_HEAD: Final = """<!doctype html>
<html lang="en">
<!-- generated: python -m tools.remedies -->
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>Refusals and what to do – nri-numa</title>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page.css">
<script type="module" src="theme.js"></script>
</head>
<body class="text">
<main>
<h1>Refusals and what to do about each</h1>
<p><a href="./">Back to the machine</a></p>
"""


def text() -> str:
    """The document."""
    body = SOURCE.read_text(encoding="utf-8").split("\n## Reasons\n", 1)[1].split("\n## ", 1)[0]
    retry = {str(member): WAITING[member.retry] for member in RejectionReason}
    parts = [_HEAD]
    for reason, section in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", body, re.S | re.M):
        # The anchor is small letters, as that of the documentation's site.
        parts.append(f'<section id="{reason.lower()}" class="card">\n<h2>{reason}</h2>\n')
        meaning, remedy = MEANING_AND_REMEDY[reason]
        summary = f"{meaning[0].upper()}{meaning[1:]}. **What to do:** {remedy}."
        parts.append(_block(f"{summary} Can waiting help? {retry[reason]}."))
        parts += [_block(block.strip()) for block in re.split(r"\n\n+", section) if block.strip()]
        parts.append("</section>\n")
    return "".join([*parts, "</main>\n</body>\n</html>\n"])


def _block(block: str) -> str:
    if found := re.fullmatch(r"```text\n(.*)\n```", block, re.S):
        return f"<pre>{html.escape(found[1])}</pre>\n"
    if re.match(r"[#|>-] |```", block):
        raise ValueError(f"{SOURCE.name}: {block[:60]!r}, expected a paragraph or a block of text")
    return f"<p>{_inline(block)}</p>\n"


def _inline(paragraph: str) -> str:
    made = html.escape(paragraph, quote=False)
    made = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", made)
    made = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", made, flags=re.S)
    made = re.sub(r"(?<!\*)\*([^*]+)\*", r"<em>\1</em>", made)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", made)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
