"""First-order steps of the same devices and cuts, as programs to compare with."""
