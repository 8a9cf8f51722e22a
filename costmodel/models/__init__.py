"""Models as a planner sees them: shapes, families, configurations, and what a pass computes."""
