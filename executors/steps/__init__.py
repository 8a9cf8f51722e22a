"""A program done: its instructions as actions on buffers, streams and tensors."""
