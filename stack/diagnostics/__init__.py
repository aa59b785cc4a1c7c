"""What a run shows of itself: memory, speed."""
