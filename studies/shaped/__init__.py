"""Hosts on one machine whose links are really slow: network namespaces on a switch, with shaped veth pairs."""
