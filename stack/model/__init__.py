"""The decoder: its table, its blocks, its attention, its loss."""
