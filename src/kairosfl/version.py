"""The version, on which nothing else depends."""

__version__ = "0.2.0"
