"""A model of regions: the home of one request, hops on the way there, and adoption by a peer."""
