"""Looking at models and runs: rows, memory, arithmetic, pages."""
