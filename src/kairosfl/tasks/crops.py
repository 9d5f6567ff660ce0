"""Random crops and mirror images of a batch, on the device and from counted keys.

Every image is moved by its own key alone, so one client's batch [b,...] and stacked ones [m,b,...]
give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kairosfl.errors import UserError

PADDINGS = ("black", "mean", "reflect")


@dataclass(frozen=True)
class Crops:
    """Crops of images at random places while training, of which every other one is mirrored.

    Args:
        share: The share of the images that are cropped; chosen anew for every step.
        padding: What surrounds an image before it is cropped: "black", the "mean" colour of the
            data set, or the image itself mirrored ("reflect"). Images that are not stored as bytes
            have zeros for the first two.
    """

    share: float = 1.0
    padding: str = "black"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(
                f"data.crops = {self.share} must be between 0 and 1, the share of images that are "
                "cropped."
            )
        if self.padding not in PADDINGS:
            raise UserError(
                f"data.padding = {self.padding!r} is unknown; use {', '.join(map(repr, PADDINGS))}."
            )


PLAIN = Crops()


def augment(
    images: Tensor,
    keys: Tensor,
    crops: Crops = PLAIN,
    *,
    mean: tuple[float, ...] = (),
    padding: int = 4,
    flip: bool = True,
) -> Tensor:
    """Crops of padded images [...,C,H,W], and a mirror image of every other one.

    `keys` [...] are those of `sample_keys`; the result for an image depends on its key and on
    nothing else. `mean` is that of the channels of bytes, as a part of 255.
    """
    channels, height, width = images.shape[-3:]
    bits = keys.reshape(-1, 1)
    offsets = 2 * padding + 1
    down = (((bits & 0xFFFFFF) * offsets) >> 24) - padding
    right = ((((bits >> 24) & 0xFFFFFF) * offsets) >> 24) - padding
    if crops.share < 1:
        cropped = (bits >> 49) & 0x3FFF < round(crops.share * 2**14)
        down = down * cropped
        right = right * cropped

    # --- where each pixel of a crop comes from: rows [n, H] and columns [n, W] ---
    rows = torch.arange(height, device=images.device) + down
    columns = torch.arange(width, device=images.device).expand(len(bits), width)
    if flip:
        columns = torch.where((bits >> 48) & 1 == 1, width - 1 - columns, columns)
    columns = columns + right
    if crops.padding == "reflect":
        rows = _reflected(rows, height)
        columns = _reflected(columns, width)
    row_inside = (rows >= 0) & (rows < height)
    column_inside = (columns >= 0) & (columns < width)
    inside = row_inside[:, :, None] & column_inside[:, None, :]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]

    # --- the pixels, and what surrounds the image ---
    flat = images.reshape(-1, channels, height * width)
    moved = flat.gather(2, source.view(-1, 1, height * width).expand(-1, channels, -1))
    inside = inside.view(-1, 1, height * width)
    if crops.padding == "mean" and images.dtype == torch.uint8 and mean:
        return torch.where(inside, moved, _colour(mean, images.device)).view(images.shape)
    return (moved * inside).view(images.shape)


def _reflected(places: Tensor, side: int) -> Tensor:
    """Places beyond the first and the last of a side mirrored at these."""
    return side - 1 - (side - 1 - places.abs()).abs()


@lru_cache(maxsize=16)
def _colour(mean: tuple[float, ...], device: torch.device) -> Tensor:
    """The mean colour as bytes, `[C, 1]`."""
    bytes_of_mean = [round(255 * part) for part in mean]
    return torch.tensor(bytes_of_mean, dtype=torch.uint8, device=device).view(-1, 1)
