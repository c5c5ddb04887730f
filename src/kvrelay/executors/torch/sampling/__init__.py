"""How the next tokens of a whole batch are chosen: random numbers, filters and penalties, log-probabilities."""
