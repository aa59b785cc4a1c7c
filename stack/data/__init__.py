"""From text to batches: corpus, packing, batches."""
