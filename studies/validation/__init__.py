"""Measurements of others against predictions from data sheets, group by group and source by source."""
