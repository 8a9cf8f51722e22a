"""First-order steps of the same devices and split points, as programs to compare with."""
