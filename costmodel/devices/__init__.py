"""What hardware does by its data sheets, what it costs, and how exchanges run over it."""
