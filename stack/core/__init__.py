"""The ground: errors, files, the machine, the ranks."""
