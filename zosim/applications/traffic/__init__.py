"""Flows that share the links of a network, without programs."""
