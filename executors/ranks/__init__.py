"""Several ranks: started, joined in groups, exchanging, watched and named when one is missing."""
