"""A page to look at, from what runs have written."""
