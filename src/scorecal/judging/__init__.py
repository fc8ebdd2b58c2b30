"""Text becomes label log-probabilities, once."""
