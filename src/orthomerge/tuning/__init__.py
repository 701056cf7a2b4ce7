"""Fine-tuning: how experts are made."""
