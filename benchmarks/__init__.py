"""Measurements of cas_ckpt: simulations that chose the formats, and the harness behind `make bench`."""
