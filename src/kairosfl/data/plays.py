"""Shakespeare's plays split by speaking role, from Project Gutenberg's complete works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

# A speech starts with a name in capitals and a full stop; its text is on the same line or the
# following ones.
SPEECH = re.compile(r"\s*((?:MRS\. |[0-9]\. )?[A-Z][A-Z’' -]*[A-Z])\.(?:\s+(\S.*))?$")
HEADING = re.compile(r"\s*(ACT|SCENE|EPILOGUE|INDUCTION|DRAMATIS PERSONAE|THE END|FINIS|\*\*\*)\b")
DIRECTION = re.compile(r"\s*\[?_?(Enter|Re-enter|Exit|Exeunt|Flourish|Alarums?|Sennet|Manet)\b")
ASIDE = re.compile(r"\[[^\]]*\]|\(_[^)]*_\)|_[^_]*_")
DIRECTIONS_OF_A_PLAY = 20  # a work with fewer stage directions is a poem


def roles(text: str) -> dict[str, str]:
    """Map `PLAY|SPEAKER` to everything the speaker says, one line of verse or prose per line."""
    spoken: dict[str, list[str]] = {}
    for play, lines in _works(text.partition("*** END OF")[0].splitlines()):
        if sum(bool(DIRECTION.match(line)) for line in lines) >= DIRECTIONS_OF_A_PLAY:
            for speaker, line in _speeches(lines):
                spoken.setdefault(f"{play}|{speaker}", []).append(line)
    return {role: "\n".join(lines) for role, lines in spoken.items()}


def _works(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Every work listed in the (indented) table of contents, with its lines."""
    stripped = list(map(str.strip, lines))
    if "Contents" not in stripped:
        return
    at = stripped.index("Contents") + 1
    titles: list[str] = []
    while at < len(lines) and (not lines[at] or lines[at][0].isspace()):
        if stripped[at]:
            titles.append(stripped[at])
        at += 1

    # Each work begins after the one before it; what is listed but not there is left out.
    headings = [line.strip(" :") for line in lines]
    starts: list[tuple[str, int]] = []
    for title in titles:
        if title in headings[at:]:
            start = headings.index(title, at)
            starts.append((title, start))
            at = start + 1
    for (title, start), (_, end) in pairwise([*starts, ("", len(lines))]):
        yield title, lines[start + 1 : end]


def _speeches(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Who speaks, and a line of it, in their order."""
    speaker = ""
    directing = False
    for line in lines:
        begin = SPEECH.match(line)
        if HEADING.match(line):
            speaker = ""
        elif begin:
            speaker = begin[1]
            directing = False
            line = begin[2] or ""
        # A stage direction ends at the next blank line; the previous speaker then continues.
        directing = bool(line.strip()) and (directing or bool(DIRECTION.match(line)))
        if directing:
            continue
        spoken = " ".join(ASIDE.sub(" ", line).split())
        if speaker and spoken:
            yield speaker, spoken
