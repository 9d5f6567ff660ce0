"""Checks for builders: sample shapes and option ranges, with one sentence for each error."""

from __future__ import annotations

from kairosfl.errors import UserError


def image(
    model: str, shape: tuple[int, ...], *, least: int = 1, hint: str = ""
) -> tuple[int, int, int]:
    """Channels, height and width of an image sample, at least `least` pixels per side."""
    if len(shape) != 3:
        raise UserError(
            f"{model} needs images (channels, height, width), got samples of shape {shape}: "
            "choose mlp for plain features, char_lstm or gpt_neox for tokens"
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise UserError(
            f"{model} needs images of at least {least}x{least}, got {height}x{width}: "
            f"load the data with size={least}{hint}"
        )
    return channels, height, width


def tokens(model: str, shape: tuple[int, ...]) -> int:
    """The length of a token sequence."""
    if len(shape) != 1:
        raise UserError(
            f"{model} needs token sequences of shape (length,), got samples of shape {shape}: "
            "choose a model for images, such as cnn or resnet18"
        )
    return shape[0]


def positive(model: str, **options: int) -> None:
    """Every option is at least 1."""
    for key, value in options.items():
        if value < 1:
            raise UserError(f"model.{key} of {model} must be at least 1, got {value}")


def not_negative(model: str, **options: int) -> None:
    """Every option is at least 0."""
    for key, value in options.items():
        if value < 0:
            raise UserError(f"model.{key} of {model} must not be negative, got {value}")


def probability(model: str, **options: float) -> None:
    """Every option is a probability below 1: a dropout of 1 would drop everything."""
    for key, value in options.items():
        if not 0 <= value < 1:
            raise UserError(f"model.{key} of {model} must be at least 0 and below 1, got {value}")
