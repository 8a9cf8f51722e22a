"""What a predicted step says, and what it does not."""
