"""Fine-tune bases into experts."""
