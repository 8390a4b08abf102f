"""Integrations: how trainers take samples. One file a trainer."""
