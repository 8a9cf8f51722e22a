"""Solutions of the exercises, one module for each study that has one: a right one, and wrong ones with what they are told."""
