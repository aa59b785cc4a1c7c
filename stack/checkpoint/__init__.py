"""Checkpoints: their format, saving and keeping them, and opening a model of any maker."""
