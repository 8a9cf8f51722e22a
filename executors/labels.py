"""What labels are, apart from models and torch: data is read where neither is loaded."""

IGNORED_LABEL = -100
"""Label of a position that takes no part in the loss, transformers' convention."""
