"""Rollouts on the nodes of a Ray cluster."""

from rollwright.integrations.ray.executor import RayExecutor, ray_executor

__all__ = ["RayExecutor", "ray_executor"]
