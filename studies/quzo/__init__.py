"""QuZO: its tables made again, what its three estimators do at few bits, and how runs in few bits train."""
