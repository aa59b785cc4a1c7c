"""Change of a vocabulary: tokens, rows of the table, moments, and what it does to the answers."""
