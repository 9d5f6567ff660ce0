"""The HTML that the report and the page of a search have in common."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files


def document(
    title: str, body: str, *, policy: str, style: str = "", head: str = "", attributes: str = ""
) -> str:
    """A whole document; nothing is loaded from anywhere else.

    Args:
        title: Its title, as text.
        body: What is inside <body>.
        policy: What it may do besides showing text: the end of its content security policy.
        style: CSS in addition to that of every page.
        head: Further elements of <head>, each with a newline.
        attributes: Of <html>, each with a space in front.
    """
    return f"""<!doctype html>
<html lang="en"{attributes}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {policy}">
<title>{escape(title)} · Kairos report</title>
<link rel="icon" href="data:,">
<style>
{asset("page.css")}{style}</style>
{head}</head>
<body>
{body}
</body>
</html>
"""


def asset(name: str) -> str:
    """A style sheet or a script."""
    return files("kairosfl.report").joinpath("assets", name).read_text(encoding="utf-8")


def option(value: str, text: str, *, selected: bool = False) -> str:
    """A choice of a <select>; text and value are plain text."""
    mark = " selected" if selected else ""
    return f'<option value="{escape(value)}"{mark}>{escape(text)}</option>'


def options(names: Iterable[str], chosen: str = "") -> str:
    """Choices whose values are what they say."""
    return "".join(option(name, name, selected=name == chosen) for name in names)


def select(name: str, choices: str, *, about: str = "") -> str:
    """A <select> of these choices; `about` is read to those who do not see it."""
    label = f' aria-label="{about}"' if about else ""
    return f'<select id="{name}"{label}>{choices}</select>'
