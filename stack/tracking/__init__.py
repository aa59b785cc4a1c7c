"""Where a run's figures go: its record, the terminal, wandb."""
