"""The settings: their types, what contradicts what, and the way from a command line to a job."""
