"""Everything that a first hour on a device should check, what would be worst first, into one report."""
