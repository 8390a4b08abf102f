"""Rollwright turns coding tasks into RL training data a trainer can trust."""

__version__ = "0.1.0"
