"""Pages that walk through zosim with scripts and exercises, and measurements that the documentation quotes."""
