"""What a model can do: validation, generation, answers, a chat."""
