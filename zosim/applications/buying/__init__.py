"""Which machine to buy or rent for a job, and what would change the answer."""
