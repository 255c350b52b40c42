"""Serving steps from captured graphs: which graph a batch takes, capture, replay."""
