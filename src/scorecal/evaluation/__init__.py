"""What to believe."""
