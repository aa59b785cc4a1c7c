"""Checkpoints: their format, saving and keeping them, and opening a model of any maker."""

from stack.checkpoint.format import (
    FORMAT,
    MANIFEST,
    STATE,
    Manifest,
    folder_of,
    load,
    read_manifest,
    step_of,
    steps,
    verify,
)
from stack.checkpoint.manager import newest, retain, save
from stack.checkpoint.tensors import digest_tensors, load_weights_into

__all__ = [
    "FORMAT", "MANIFEST", "STATE", "Manifest", "digest_tensors", "folder_of", "load", "load_weights_into",
    "newest", "read_manifest", "retain", "save", "step_of", "steps", "verify",
]  # fmt: skip
