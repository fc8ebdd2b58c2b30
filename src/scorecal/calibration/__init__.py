"""Label log-probabilities become scores."""
