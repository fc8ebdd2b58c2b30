"""Pure functions of tensors, tested against outside references."""
