"""Text and tokens: tokenizers, conversations, and what both are made of."""
