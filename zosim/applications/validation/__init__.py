"""Predictions held against measurements that somebody else made."""
