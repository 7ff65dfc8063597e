"""Regions that help each other: what their gateways tell, and which region a request goes to."""
