"""Solutions of the course's units: `right` and WRONG of the exercise; `answers` and MISSES of the pencil, from a student's numbers."""
