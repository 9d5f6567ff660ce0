"""Pictures of a client: one sub-directory per class, or files with a labels.csv."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kairosfl.data.intake import Room, read_regular, readable
from kairosfl.data.tables import Array, read_csv
from kairosfl.errors import UserError, first_line
from kairosfl.wording import counted

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
LABELS = "labels.csv"
# Whatever the name says; others run programs, as EPS does.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")
RGB = 3  # bytes of a pixel


def is_picture(file: Path) -> bool:
    return file.suffix.lower() in PICTURES


def read_pictures(
    place: Path, size: Sequence[int], target: str, room: Room | None = None
) -> tuple[Array, Array, str]:
    """Pixels as uint8 `[n, C, H, W]`, the names of their classes, and the md5 of all files.

    Args:
        place: A directory with a sub-directory per class, or with pictures and a labels.csv, whose
            columns are `file` and the target.
        size: Height and width to which pictures are resized; empty: they must have the same size.
        target: The column of labels.csv with the class.
        room: The memory that is left for them.
    """
    room = room or Room()
    files, labels = _listed(place, target, room)
    if size:
        subject = f"{counted(len(files), 'picture')} in {place} with data.size = {list(size)}"
        room.take(len(files) * RGB * size[0] * size[1], subject, "give a smaller size")
    digest = hashlib.md5(usedforsecurity=False)
    pixels: list[Array] = []
    for file in files:
        content = read_regular(file, room)
        digest.update(content)
        pixels.append(_pixels(file, content, size, room))
        if pixels[-1].shape[1:] != pixels[0].shape[1:]:
            raise UserError(unequal(file, pixels[-1], files[0], pixels[0]))
    digest.update("\n".join(labels).encode())
    if not pixels:
        raise UserError(
            f"{place} has no pictures ({', '.join(PICTURES)}); add some, or remove the directory."
        )
    return joined(pixels), np.array(labels, dtype=np.str_), digest.hexdigest()


def joined(pictures: Sequence[Array], stack: Any = np.stack) -> Array:
    """Pictures together; grey ones become RGB if some of them are not grey."""
    channels = max(picture.shape[-3] for picture in pictures)
    wide = []
    for picture in pictures:
        copies = channels // picture.shape[-3]
        wide.append(np.repeat(picture, copies, axis=picture.ndim - 3))
    return np.asarray(stack(wide))


def unequal(file: Path, pixels: Array, first: Path, others: Array) -> str:
    """The sentence about two pictures of different sizes."""
    height, width = pixels.shape[-2:]
    h, w = others.shape[-2:]
    return (
        f"{file} is {width}x{height} pixels, but {first} is {w}x{h}; set data.size to a common "
        f"height and width, such as [{h}, {w}]."
    )


def _listed(place: Path, target: str, room: Room) -> tuple[list[Path], list[str]]:
    """The pictures of a client and their classes."""
    loose = sorted(entry for entry in place.iterdir() if entry.is_file() and is_picture(entry))
    if not loose:
        return _by_directory(place)
    table = place / LABELS
    if not table.is_file():
        raise UserError(
            f"{place} has pictures without a class, such as {loose[0].name}; put them into one "
            f"sub-directory per class, or add a {LABELS} with the columns file and {target}."
        )
    columns = read_csv(table, read_regular(table, room), ",", room).columns
    for name in ("file", target):
        if name not in columns:
            raise UserError(
                f"{table} has no column {name!r}; give it the columns file and {target}."
            )
    files = [place / str(name) for name in columns["file"]]
    for line, file in enumerate(files, 2):
        if not file.is_file():
            raise UserError(
                f"{table} names {file.name} in line {line}, which does not exist; correct the line."
            )
    unnamed = sorted(set(loose) - set(files))
    if unnamed:
        raise UserError(f"{table} has no line for {unnamed[0].name}; add one.")
    labels = columns[target]
    if labels.dtype == object:
        return files, list(map(str, labels))
    return files, [f"{label:g}" for label in labels]


def _by_directory(place: Path) -> tuple[list[Path], list[str]]:
    """The pictures in sub-directories, which are their classes."""
    files = []
    labels = []
    for folder in sorted(place.iterdir()):
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        for file in sorted(folder.iterdir()):
            if is_picture(file):
                files.append(file)
                labels.append(readable(folder.name))
    return files, labels


def _pixels(file: Path, content: bytes, size: Sequence[int], room: Room) -> Array:
    """One picture as uint8 `[C, H, W]`; without a common size it takes its part of the room."""
    picture = opened(file, content)
    needed = RGB * picture.width * picture.height
    room.check(needed, file, "scale it down")
    if not size:
        room.take(needed, file, "set data.size, to which pictures are scaled down")
    pixels = decoded(file, picture, ("L", "RGB"), size)
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1))


def opened(file: Path, content: bytes) -> Any:
    """A picture of which only the header is read, as Pillow has it."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError(f"{file} needs Pillow to be read: pip install 'kairosfl[files]'.") from None
    try:
        with warnings.catch_warnings():
            # What is too large is refused.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UserError(f"{file} has more than {most:,} pixels; scale it down.") from None
    except Exception as error:  # of a damaged file, anything may come out
        raise unreadable(file, error) from None


def decoded(file: Path, picture: Any, modes: Sequence[str], size: Sequence[int] = ()) -> Array:
    """The pixels of a picture `[H, W]` or `[H, W, C]`, as RGB if it is in none of these modes."""
    try:
        if picture.mode not in modes:
            picture = picture.convert("RGB")
        if size:
            picture = picture.resize((size[1], size[0]))
        return np.array(picture)
    except MemoryError:
        raise
    except Exception as error:
        raise unreadable(file, error) from None


def unreadable(file: Path, error: Exception) -> UserError:
    """The error for a picture that is damaged."""
    return UserError(
        f"{file} cannot be read as a picture ({first_line(error)}); replace it with an intact copy."
    )
