"""Streams of answers: their meta data, their events as they are sent, and who reads them."""
